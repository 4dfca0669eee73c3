"""`penstock explain`: what a recorded run waited for, its worst moments, and what a change would bring."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_count, parsed_size, refuse_together
from penstock.cli.output import Table, add_command, add_output_options, naming, print_line, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.measure.explain import Explanation
    from penstock.measure.outlook import Outlook
    from penstock.measure.replay import Change
    from penstock.store import Source
    from penstock.trace import Trace

#: A reason of less than this share of the lost time gets no line.
_WORTH_A_LINE = 0.001


def add_explain(commands: Any) -> None:
    parser = add_command(
        commands,
        "explain",
        _explain,
        "explain what a recorded run waited for, and what would help",
        "Attribute every wait of a run to what its last missing sample waited for, show the worst moments,\n"
        "and replay the run's own plan with changes.",
        "Example: penstock explain run.trace --memory 8GiB --readers 32\n"
        "JSON: run_seconds, stall_seconds, blocked_seconds, results[] of reason, seconds, batches, advice;\n"
        "moments[] of rank, epoch, step, start_seconds, seconds, reason, samples[], group, names[], place,\n"
        "read_seconds; changes[] of change, stall_seconds, gain_seconds; replayed_seconds, is_near, slow_rank,\n"
        "notes[].",
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="trace that a loader recorded, or the folder of all ranks' traces",
    )
    parser.add_argument("--memory", metavar="SIZE", help="replay it with this memory=, as in 8GiB")
    parser.add_argument("--readers", metavar="N", help="replay it with so many reads at once")
    parser.add_argument("--decoders", metavar="N", help="replay it with so many threads that decode")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="replay it on this machine")
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        help="replay it with the data here, which is measured for 10 s; names its samples",
    )
    parser.add_argument(
        "--moments", metavar="N", default="5", help="show so many of the worst moments (%(default)s)"
    )
    add_output_options(parser, plot=False)


def _explain(options: argparse.Namespace) -> None:
    from penstock.measure.explain import ADVICE, explain, read_run
    from penstock.measure.outlook import look_ahead
    from penstock.store import open_source

    moments = parsed_count("--moments", options.moments)
    asked = _asked(options)
    with naming(options.trace):
        trace = read_run(options.trace)
    source = None if options.source is None else open_source(options.source)
    with naming(options.trace):
        found = explain(trace, None if source is None else _describing(source), moments)
    if source is not None:
        from penstock.measure.calibrate import calibrate

        asked = replace(asked, machine=calibrate(source))
    changes = _changes(options, asked)
    outlook, notes = None, list(found.notes)
    with naming(options.trace):
        try:
            outlook = look_ahead(trace, changes or None, found)
        except ConfigError as error:
            if changes:
                raise
            notes.append(f"what a change would bring is not known: {error}")
    if outlook is not None and not outlook.prospects:
        outlook = None
    if outlook is not None:
        notes += outlook.notes
        if not outlook.is_near:
            notes.append(
                f"CAUTION: a replay of the run as it was stalls for {format_seconds(outlook.replayed_seconds)}, not "
                f"for the measured {format_seconds(outlook.measured_seconds)}: trust the differences only roughly"
            )
    notes = [*(f"{reason}: {ADVICE[reason]}" for reason in found.notable), *notes]
    tables = [table for table in (_reasons(found), _moments(found, trace)) if table.rows]
    if outlook is not None:
        tables.append(_prospects(outlook))
    if trace.meta.get("source"):
        notes.append(f"the source: {trace.meta['source']}")
    if not options.json:
        print_line(found.verdict)
    show(options, _values(found, outlook, notes), tables, notes)


def _describing(source: Source) -> Callable[[int], str]:
    def describe(sample: int) -> str:
        return source.describe(sample) if sample < len(source) else f"sample {sample}"

    return describe


def _asked(options: argparse.Namespace) -> Change:
    """Return all changes that options ask for at once, but for the machine that --source is measured for."""
    from penstock.loader.setup import read_machine
    from penstock.measure.replay import Change
    from penstock.store.calls import Calls

    refuse_together(options, "machine", ["source"])
    return Change(
        memory_bytes=given(options, "memory", parsed_size),
        readers=given(options, "readers", parsed_count),
        decoders=given(options, "decoders", parsed_count),
        machine=read_machine(options.machine, Calls()),
    )


def _changes(options: argparse.Namespace, asked: Change) -> list[tuple[str, Change]]:
    """Return the changes that were asked for, each alone and then all together."""
    from penstock.measure.replay import Change

    found: list[tuple[str, Change]] = []
    if asked.memory_bytes is not None:
        memory = Change(memory_bytes=asked.memory_bytes)
        found.append((f"memory {format_bytes(asked.memory_bytes)}", memory))
    if asked.readers is not None:
        found.append((format_count(asked.readers, "reader"), Change(readers=asked.readers)))
    if asked.decoders is not None:
        found.append((format_count(asked.decoders, "decoder"), Change(decoders=asked.decoders)))
    if asked.machine is not None:
        what = f"machine {options.machine}" if options.source is None else f"data at {options.source}"
        found.append((what, Change(machine=asked.machine)))
    return [*found, ("all of these", asked)] if len(found) > 1 else found


def _values(found: Explanation, outlook: Outlook | None, notes: list[str]) -> dict[str, Any]:
    from penstock.measure.explain import ADVICE

    return {
        "run_seconds": found.run_seconds,
        "stall_seconds": found.stall_seconds,
        "blocked_seconds": found.blocked_seconds,
        "results": [
            {
                "reason": str(reason),
                "seconds": seconds,
                "batches": found.batches[reason],
                "advice": ADVICE[reason],
            }
            for reason, seconds in found.by_reason.items()
            if seconds > 0
        ],
        "moments": [asdict(moment) for moment in found.moments],
        "changes": [
            {
                "change": each.what,
                "stall_seconds": each.stall_seconds,
                "gain_seconds": outlook.replayed_seconds - each.stall_seconds,
            }
            for each in outlook.prospects
        ]
        if outlook is not None
        else [],
        "replayed_seconds": None if outlook is None else outlook.replayed_seconds,
        "is_near": None if outlook is None else outlook.is_near,
        "slow_rank": found.slow_rank,
        "notes": notes,
    }


def _reasons(found: Explanation) -> Table:
    rows = [
        (
            str(reason),
            format_seconds(seconds),
            f"{100 * seconds / found.lost_seconds:.1f} %",
            f"{found.batches[reason]:,}" if found.batches[reason] else "",
        )
        for reason, seconds in found.by_reason.items()
        if seconds > _WORTH_A_LINE * found.lost_seconds
    ]
    return Table("What was waited for", ("reason", "lost", "share", "batches"), rows)


def _moments(found: Explanation, trace: Trace) -> Table:
    import numpy as np

    several = np.unique(trace.spans["rank"]).size > 1
    rows = [
        (
            each.when,
            *((str(each.rank),) if several else ()),
            format_seconds(each.start_seconds),
            format_seconds(each.seconds),
            str(each.reason),
            each.samples_text,
            each.place,
            format_seconds(each.read_seconds) if each.read_seconds else "",
        )
        for each in found.moments
    ]
    columns = (
        "when",
        *(("rank",) if several else ()),
        "at",
        "lost",
        "reason",
        "last sample",
        "from",
        "its read",
    )
    return Table("The worst moments", columns, rows)


def _prospects(outlook: Outlook) -> Table:
    replayed = outlook.replayed_seconds
    rows = [
        ("as it was, replayed", format_seconds(replayed), ""),
        *(
            (
                each.what,
                format_seconds(each.stall_seconds),
                format_seconds(replayed - each.stall_seconds) if each.stall_seconds < replayed else "nothing",
            )
            for each in outlook.prospects
        ),
    ]
    costs = "learned from this run" if outlook.learned else "of the run's machine"
    return Table(f"What a change would bring, at the costs {costs}", ("change", "stall", "gain"), rows)
