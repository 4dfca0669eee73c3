"""`penstock explain`: what a recorded run waited for, its worst moments, and what a change would bring."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_count, parsed_size
from penstock.cli.output import Table, add_command, add_output_options, naming, print_line, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.loader.config import LoaderArguments
    from penstock.measure.explain import Explanation
    from penstock.measure.outlook import Outlook
    from penstock.measure.recorded import Run
    from penstock.measure.replay import Change
    from penstock.measure.switch import Switch
    from penstock.store import Source

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
        "notes[]; switch, of another loader's run: steps, measured_seconds, measured_stall_seconds,\n"
        "predicted_seconds, predicted_stall_seconds, notes[].\n"
        "Of a graph: run_seconds, steps, median_seconds, first_steps and first_seconds (of the first of\n"
        "their fetches, which count apart); results[] of task, held_seconds, seconds_by_activity{},\n"
        "received_seconds{}, live_bytes; links[] of from, to, held_seconds; nodes[] of what, task, seconds, times;\n"
        "moments[] of step, start_seconds, seconds, task, held_seconds, node; notes[].",
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
        help="data of the run: names its samples, and without --machine measured for 10 s to replay the run on",
    )
    parser.add_argument(
        "--moments", metavar="N", default="5", help="show so many of the worst moments (%(default)s)"
    )
    add_output_options(parser, plot=False)


def _explain(options: argparse.Namespace) -> None:
    from penstock.measure.explain import ADVICE, explain, moment_rows
    from penstock.measure.recorded import open_run
    from penstock.store import open_source

    moments = parsed_count("--moments", options.moments)
    asked = _asked(options)
    with naming(options.trace):
        run = open_run(options.trace)
    if run.outline.workers:
        _explain_graph(options, run)
        return
    source = None if options.source is None else open_source(options.source)
    with naming(options.trace):
        # Of several data sets, it is not known whose samples these are.
        describe = None if source is None or len(run.sources) > 1 else _describing(source)
        found = explain(run, describe, moments)
    if source is not None and asked.machine is None:
        from penstock.measure.calibrate import calibrate

        asked = replace(asked, machine=calibrate(source))
    outlook, notes, changes = None, list(found.notes), _changes(options, asked)
    has_own = not all(run.watched)
    with naming(options.trace):
        switch, more = _switch(run, source, asked)
    notes += more
    if changes and source is None and not has_own:
        notes.append(
            "none of its loaders is Penstock's, to be replayed: without --source, --memory, --readers, --decoders and "
            "--machine have no effect"
        )
    if has_own and run.outline.left_out.spans and not changes:
        notes.append(
            "what a change would bring is tried for a long run where asked: --memory, --readers, --machine"
        )
    with naming(options.trace):
        try:
            if has_own and (changes or not run.outline.left_out.spans):
                from penstock.measure.outlook import look_ahead

                outlook = look_ahead(run, changes or None, found)
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
    worst = Table("The worst moments", *moment_rows(found))
    tables = [table for table in (_reasons(found), worst) if table.rows]
    if outlook is not None:
        tables.append(_prospects(outlook))
    if run.sources:
        notes.append(f"the source: {', '.join(run.sources)}")
    if not options.json:
        print_line(found.verdict)
    show(options, {**_values(found, outlook, notes), "switch": switch_values(switch)}, tables, notes)


def _explain_graph(options: argparse.Namespace, run: Run) -> None:
    """Show what the steps of a graph waited for."""
    from penstock.measure.graph_page import node_rows, slow_rows, worker_rows
    from penstock.measure.graph_steps import explain_graph

    found = explain_graph(run.trace())
    notes = [note for note in (found.advice, *found.notes, *run.notes) if note]
    if any(each is not None for each in (options.memory, options.readers, options.decoders, options.machine)):
        notes.append("a graph is not replayed: what would change a loader has no effect")
    if not options.json:
        print_line(found.verdict)
    data = {
        "run_seconds": found.seconds,
        "steps": found.steps,
        "median_seconds": found.median_seconds,
        "first_steps": found.first_steps,
        "first_seconds": found.first_seconds,
        "results": [
            {
                "task": each.task,
                "held_seconds": each.held_seconds,
                "seconds_by_activity": {str(doing): seconds for doing, seconds in each.doing.items()},
                "received_seconds": dict(each.received),
                "live_bytes": each.live_bytes,
            }
            for each in found.workers
        ],
        "links": [
            {"from": ends[0], "to": ends[1], "held_seconds": seconds} for ends, seconds in found.links.items()
        ],
        "nodes": [asdict(each) for each in found.nodes],
        "moments": [asdict(each) for each in found.slowest],
        "notes": notes,
    }
    titles = "What workers did", "What steps waited for longest", "The slowest steps"
    made = (worker_rows(found), node_rows(found), slow_rows(found))
    tables = [
        Table(title, columns, rows)
        for title, (columns, rows) in zip(titles, made, strict=True)
        if found.steps
    ]
    show(options, data, tables, notes)


def _switch(run: Run, source: Source | None, asked: Change) -> tuple[Switch | None, list[str]]:
    """Return what Penstock would make of other loaders' runs, and what is to say of it; None where all are ours."""
    watched = run.watched
    if not any(watched):
        return None, []
    if source is None:
        return None, [
            "what Penstock's loader would make of this run: add --source FOLDER --machine FILE, which penstock "
            "calibrate writes"
        ]
    from penstock.measure.switch import predict_switch_of_run

    try:
        switch = predict_switch_of_run(run, source, **_arguments(asked))
    except ConfigError as error:
        if run.loaders == 1 and all(watched):
            raise
        return None, [f"what a switch would bring is not known: {error}"]
    return switch, [str(switch), *switch.notes]


def _describing(source: Source) -> Callable[[int], str]:
    def describe(sample: int) -> str:
        return source.describe(sample) if sample < len(source) else f"sample {sample}"

    return describe


def _arguments(asked: Change) -> LoaderArguments:
    """Return the changes as arguments of a loader."""
    given: LoaderArguments = {"machine": asked.machine}
    if asked.memory_bytes is not None:
        given["memory"] = asked.memory_bytes
    if asked.readers is not None:
        given["readers"] = asked.readers
    if asked.decoders is not None:
        given["decoders"] = asked.decoders
    return given


def switch_values(switch: Switch | None) -> dict[str, Any] | None:
    """Return what JSON says of what Penstock would make of a run of another loader."""
    return None if switch is None else asdict(switch)


def _asked(options: argparse.Namespace) -> Change:
    """Return all changes that options ask for at once, but for the machine that --source is measured for."""
    from penstock.loader.setup import read_machine
    from penstock.measure.replay import Change
    from penstock.store.calls import Calls

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
        what = f"data at {options.source}" if options.machine is None else f"machine {options.machine}"
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


def _prospects(outlook: Outlook) -> Table:
    replayed = outlook.replayed_seconds
    rows = [
        ("as it was, replayed", format_seconds(replayed), ""),
        *(
            (each.what, format_seconds(each.stall_seconds), _gain(replayed - each.stall_seconds))
            for each in outlook.prospects
        ),
    ]
    costs = "learned from this run" if outlook.learned else "of the run's machine"
    return Table(f"What a change would bring, at the costs {costs}", ("change", "stall", "gain"), rows)


def _gain(seconds: float) -> str:
    if seconds > 0:
        return format_seconds(seconds)
    return f"{format_seconds(-seconds)} lost" if seconds < 0 else "nothing"
