"""`penstock explain`: what a recorded run waited for, its worst moments, and what a change would bring."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_count, parsed_size
from penstock.cli.output import Table, add_command, add_output_options, print_line, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.measure.explain import Explanation, Reason
    from penstock.measure.outlook import Outlook
    from penstock.measure.replay import Change
    from penstock.store import Source
    from penstock.trace import Trace

#: A reason of less than this share of the lost time gets no line.
_WORTH_A_LINE = 0.001
#: One of more than this share is followed by what to do about it.
_NOTABLE = 0.1


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

    moments = parsed_count("--moments", options.moments)
    trace = read_run(options.trace)
    source = None if options.source is None else _opened(options.source)
    try:
        found = explain(trace, None if source is None else _describing(source), moments)
        changes = _changes(options, source)
        outlook, notes = None, list(found.notes)
        try:
            outlook = look_ahead(trace, changes, found)
        except ConfigError as error:
            if changes:
                raise ConfigError(f"{options.trace}: {error}") from error
            notes.append(f"what a change would bring is not known: {error}")
    except ConfigError as error:
        raise (
            error if str(options.trace) in str(error) else ConfigError(f"{options.trace}: {error}")
        ) from error
    if outlook is not None:
        notes += outlook.notes
    if outlook is not None and outlook.prospects and not outlook.is_near:
        notes.append(
            f"CAUTION: a replay of the run as it was stalls for {format_seconds(outlook.replayed_seconds)}, not for "
            f"the measured {format_seconds(outlook.measured_seconds)}: trust the differences only roughly"
        )
    notes = [*(f"{reason}: {ADVICE[reason]}" for reason in _notable(found)), *notes]
    tables = [table for table in (_reasons(found), _moments(found, trace), _prospects(outlook)) if table.rows]
    if trace.meta.get("source"):
        notes.append(f"the source: {trace.meta['source']}")
    if not options.json:
        print_line(found.verdict)
    show(options, _values(found, outlook, notes), tables, notes)


def _opened(name: str) -> Source:
    from penstock.store import open_source

    return open_source(name)


def _describing(source: Source) -> Callable[[int], str]:
    def describe(sample: int) -> str:
        return source.describe(sample) if sample < len(source) else f"sample {sample}"

    return describe


def _changes(options: argparse.Namespace, source: Source | None) -> list[tuple[str, Change]] | None:
    """Return the changes that were asked for, each alone and then all together; None where none was."""
    from dataclasses import replace

    from penstock.loader.setup import read_machine
    from penstock.measure.calibrate import calibrate
    from penstock.measure.replay import Change
    from penstock.store.calls import Calls

    found: list[tuple[str, Change]] = []
    memory = given(options, "memory", parsed_size)
    if memory is not None:
        found.append((f"memory {format_bytes(memory)}", Change(memory_bytes=memory)))
    readers, decoders = given(options, "readers", parsed_count), given(options, "decoders", parsed_count)
    if readers is not None:
        found.append((format_count(readers, "reader"), Change(readers=readers)))
    if decoders is not None:
        found.append((format_count(decoders, "decoder"), Change(decoders=decoders)))
    if options.machine is not None and source is not None:
        raise ConfigError(
            "--machine and --source do not go together: both say what a read costs; leave one out"
        )
    if options.machine is not None:
        found.append((f"machine {options.machine}", Change(machine=read_machine(options.machine, Calls()))))
    if source is not None:
        found.append((f"data at {options.source}", Change(machine=calibrate(source))))
    if len(found) > 1:
        all_of_them = Change(memory, readers, decoders, found[-1][1].machine)
        found.append(("all of these", replace(all_of_them)))
    return found or None


def _values(found: Explanation, outlook: Outlook | None, notes: list[str]) -> dict[str, Any]:
    from dataclasses import asdict

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
            for each in (outlook.prospects if outlook is not None else ())
            if outlook is not None
        ],
        "replayed_seconds": outlook.replayed_seconds if outlook is not None and outlook.prospects else None,
        "is_near": outlook.is_near if outlook is not None and outlook.prospects else None,
        "slow_rank": found.slow_rank,
        "notes": notes,
    }


def _notable(found: Explanation) -> list[Reason]:
    return [reason for reason, seconds in found.by_reason.items() if seconds > _NOTABLE * found.lost_seconds]


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
    several = len(set(trace.spans["rank"].tolist())) > 1
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


def _prospects(outlook: Outlook | None) -> Table:
    rows: list[tuple[str, ...]] = []
    if outlook is not None and outlook.prospects:
        rows.append(("as it was, replayed", format_seconds(outlook.replayed_seconds), ""))
        rows += [
            (
                each.what,
                format_seconds(each.stall_seconds),
                format_seconds(outlook.replayed_seconds - each.stall_seconds)
                if each.stall_seconds < outlook.replayed_seconds
                else "nothing",
            )
            for each in outlook.prospects
        ]
    costs = "learned from this run" if outlook is not None and outlook.learned else "of the run's machine"
    return Table(f"What a change would bring, at the costs {costs}", ("change", "stall", "gain"), rows)
