"""`penstock plan`: which machine to buy."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import POLICIES, given, parsed, parsed_amount, parsed_names
from penstock.cli.output import Table, add_command, add_output_options, needing, progress, show
from penstock.errors import ConfigError
from penstock.report import print_report
from penstock.units import format_bytes, format_count

if TYPE_CHECKING:
    from penstock.measure.sweep import Outcome, Runner, Sweep, Task
    from penstock.measure.sweep_answer import Answer, Row
    from penstock.policy.forms import CropForm
    from penstock.simulate.scenario import Scenario

#: Predicting for longer than this is announced.
_LONG_SECONDS = 10.0
_MOST_REASONS = 5
#: Longer tables are printed only with --all.
_MOST_ROWS = 30
#: Of 224 x 224 pixels; and what a photograph is decoded to, times its file.
_CROP_BYTES, _PICTURE_SHARE = 224 * 224 * 3, 6


def add_plan(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        _plan,
        "find the cheapest machine that a training needs",
        "Predict a training on many machines; find the cheapest whose run time is within --within of the lower bound.",
        "Sizes are lists and ranges: 10GB,20GB or 10GB..80GB*2 or 10GB..40GB+10GB; 0 leaves a tier out.\n"
        "What is not given stays as the scenario has it.\n"
        "Example: penstock plan scenario1 --ranks 1 --memory 0,100MB --local-disk 0 --price memory=3/GB --within 6%\n"
        "JSON: results[], one for each policy at each point; cheapest, least[], closest, fastest, front[] of them;\n"
        "all explained in docs/reference/plan-command.md.",
    )
    parser.add_argument("scenario", metavar="SCENARIO", help="a built-in name or a file, NAME.toml")
    sweep = parser.add_argument_group("what to vary")
    sweep.add_argument("--memory", metavar="SIZES", help="memory per rank that keeps samples")
    sweep.add_argument("--local-disk", metavar="SIZES", help="local disk per rank that keeps samples")
    sweep.add_argument(
        "--local-disk-read", metavar="RATE", help="how fast that disk reads, if not as the scenario says"
    )
    sweep.add_argument("--staging", metavar="SIZES", help="staging buffer per rank")
    sweep.add_argument("--ranks", metavar="NUMBERS", help="numbers of ranks")
    sweep.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"loading policies, with commas: {POLICIES}; your own as module:Class (frequency)",
    )
    sweep.add_argument(
        "--samples", type=int, metavar="F", help="samples that are drawn, instead of the scenario's"
    )
    sweep.add_argument("--batch-size", type=int, metavar="B", help="samples of a global batch, likewise")
    sweep.add_argument("--epochs", type=int, metavar="E", help="epochs, likewise")
    sweep.add_argument(
        "--seed", type=int, metavar="SEED", help="seed of the order and of drawn sizes, likewise"
    )
    kept = parser.add_argument_group("in which form samples are kept")
    kept.add_argument(
        "--keep",
        metavar="FORM",
        help="form: stored, crops (one of each, for all epochs), 3 crops (of so many epochs) or decoded (stored)",
    )
    kept.add_argument(
        "--kept-size",
        metavar="SIZE",
        help="size of a crop (224 x 224 pixels), or of a decoded picture (6 times its file)",
    )
    choice = parser.add_argument_group("what to choose by")
    choice.add_argument(
        "--price",
        action="append",
        metavar="WHAT=PRICE",
        help="memory=3/GB, local-disk=0.1/GB, staging=3/GB or rank=5000 (of its host), in any currency; once for each",
    )
    choice.add_argument(
        "--within", default="5%", metavar="SHARE", help="slowdown over the lower bound, at most (%(default)s)"
    )
    choice.add_argument("--deadline", metavar="TIME", help="longest run time, as in 2h")
    parser.add_argument(
        "--all",
        action="store_true",
        default=None,
        help=f"print the table of all points, however long; without it one of more than {_MOST_ROWS} rows is left out",
    )
    doing = parser.add_argument_group("how to compute it")
    doing.add_argument("--jobs", type=int, metavar="N", help="processes at once, at most (one per processor)")
    doing.add_argument(
        "--ray", metavar="ADDRESS", help="compute on a Ray cluster: local, auto or its address"
    )
    doing.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("plan-out"),
        help="folder that keeps finished predictions (%(default)s)",
    )
    add_output_options(parser)


def _plan(options: argparse.Namespace) -> None:
    from penstock.files import write_whole
    from penstock.measure.plot_sweep import check_panels, draw_sweep
    from penstock.measure.sweep_answer import answer_values, judge, parquet_of, price_decimals
    from penstock.measure.sweep_ranges import parse_prices
    from penstock.measure.sweep_store import KeptPoints
    from penstock.units import parse_seconds, parse_share

    within = parsed("--within", parse_share, options.within)
    prices = parse_prices(options.price) if options.price else None
    deadline_seconds = given(options, "deadline", parsed_amount, parse_seconds) or float("inf")
    sweep = _sweep_of(options)
    # All that can be missing is missed now, not after hours.
    with needing("penstock plan", "study"):
        import pyarrow.parquet  # noqa: F401
    if options.plot is not None:
        check_panels(options.plot, sweep)
    run = _runner(options)
    with KeptPoints(options.out) as kept:
        outcomes = _computed(sweep, run, kept, options.out)
        answer = judge(outcomes, within=within, prices=prices, deadline_seconds=deadline_seconds)
        values = answer_values(answer, sweep)
        write_whole(options.out / "plan.json", f"{json.dumps(values, indent=2, allow_nan=False)}\n".encode())
        write_whole(options.out / "points.parquet", parquet_of(answer, sweep))
    decimals = price_decimals(answer.rows, 2)
    notes = [*_assumed(sweep), *_verdict(answer, decimals), *_failures(answer)]
    tables = _tables(answer, sweep, decimals)
    if len(answer.rows) > _MOST_ROWS and not options.all:
        tables = tables[1:]
        notes.append(f"The table of all {len(answer.rows):,} rows is left out: --all prints it.")
    notes.append(f"All of it is in {options.out}/points.parquet and {options.out}/plan.json.")
    show(options, values, tables, notes, lambda: draw_sweep(answer))
    if all(row.outcome.run_seconds is None for row in answer.rows):
        raise ConfigError(
            f"no point has a result; the reasons are above and in {options.out}/plan.json: "
            "try other --policies, or change what they name in the scenario"
        )


def _sweep_of(options: argparse.Namespace) -> Sweep:
    from penstock.cli.scenario import scenario_from
    from penstock.measure.own_policy import find_policy
    from penstock.measure.sweep import LOWER_BOUND, Sweep
    from penstock.measure.sweep_ranges import parse_counts, parse_sizes
    from penstock.units import parse_rate

    def sizes(option: str, may_be_zero: bool) -> tuple[int, ...] | None:
        text = getattr(options, option)
        return (
            None
            if text is None
            else parse_sizes(text, f"--{option.replace('_', '-')}", may_be_zero=may_be_zero)
        )

    # Here --ranks is a range of its own.
    scenario = scenario_from(argparse.Namespace(**{**vars(options), "ranks": None}))
    if scenario.machine.compute is None:
        raise ConfigError(
            f"{options.scenario}: machine.compute is missing, so how fast the training consumes is not known: "
            'add it, for example compute = "640 samples/s"'
        )
    policies = tuple(
        parsed_names("frequency" if options.policies is None else options.policies, "--policies")
    )
    for name in policies:
        find_policy(name)
    if set(policies) == {LOWER_BOUND}:
        raise ConfigError(
            f"--policies names only {LOWER_BOUND}, which is what every point is measured by and nothing that could be "
            "chosen: name one that can be run, for example frequency"
        )
    return Sweep(
        scenario,
        policies,
        ranks=None if options.ranks is None else parse_counts(options.ranks, "--ranks"),
        staging_bytes=sizes("staging", may_be_zero=False),
        memory_bytes=sizes("memory", may_be_zero=True),
        local_disk_bytes=sizes("local_disk", may_be_zero=True),
        local_disk_bytes_per_second=given(options, "local_disk_read", parsed_amount, parse_rate),
        form=_form_of(options, scenario),
    )


def _form_of(options: argparse.Namespace, scenario: Scenario) -> CropForm | None:
    """Return the form that --keep asks for; None for samples as stored."""
    from penstock.loader.keep import AUTO, DECODED, check_keep
    from penstock.policy.forms import CropForm
    from penstock.units import parse_bytes

    keep = "stored" if options.keep is None else options.keep
    epochs = parsed("--keep", check_keep, keep)
    size = given(options, "kept_size", parsed_amount, parse_bytes)
    if keep == AUTO:
        raise ConfigError('--keep is "auto", and a plan compares what you name: give one form at a time')
    if epochs is None:
        if size is not None:
            raise ConfigError("--kept-size is given, and samples are kept as stored: give --keep, too")
        return None
    usual = _PICTURE_SHARE * float(scenario.sizes_bytes().mean()) if keep == DECODED else _CROP_BYTES
    return CropForm(int(size or usual), epochs, is_decoded=keep == DECODED)


def _runner(options: argparse.Namespace) -> Runner:
    from penstock.flow.cpus import available_cpus
    from penstock.measure.sweep_processes import in_processes

    jobs = available_cpus() if options.jobs is None else options.jobs
    if options.ray is None:
        return in_processes(jobs)
    with needing("--ray", "ray"):
        from penstock.measure.sweep_ray import on_ray

        return on_ray(options.ray, jobs)


def _computed(sweep: Sweep, run: Runner, kept: Any, out: Path) -> dict[Task, Outcome]:
    from penstock.measure.sweep import run_sweep

    total = len(sweep.tasks)
    finished: int | None = None  # until what was kept before is counted
    try:
        # What Ray prints of its own while it works does not belong among the results.
        with (
            contextlib.redirect_stdout(sys.stderr),
            progress(f"predicting {sweep.scenario.name}", total) as show_done,
        ):

            def done(tasks: int) -> None:
                nonlocal finished
                if finished is None and tasks < total:
                    _report_time(sweep)
                finished = tasks
                show_done(tasks)

            return run_sweep(sweep, run, kept, done=done)
    except KeyboardInterrupt:
        print_report(
            f"{finished or 0} of {total} predictions are done and kept in {out}; the same command continues from there"
        )
        raise


def _report_time(sweep: Sweep) -> None:
    """Report how long predicting will take, where that is worth waiting for; have virtual time compiled."""
    from penstock.loader.prediction import prepare_clock
    from penstock.simulate.scheduled import SECONDS_PER_READ

    reads = sum(map(sweep.reads, sweep.tasks))
    prepare_clock(reads)
    seconds = reads * SECONDS_PER_READ
    if seconds > _LONG_SECONDS:
        print_report(
            f"{format_count(len(sweep.tasks), 'row')} are predicted read by read: about {seconds:,.0f} s of one core. "
            "Fewer --epochs, or a smaller data set of the same kind, are predicted sooner"
        )


def _assumed(sweep: Sweep) -> list[str]:
    """Say what is taken for granted where the scenario is silent."""
    machine, most_ranks = sweep.scenario.machine, max(point.ranks for point in sweep.points)
    notes = []
    if sweep.form is not None:
        notes.append(
            f"Memory keeps samples as {sweep.form.name}, {format_bytes(sweep.form.crop_bytes)} each."
        )
    if most_ranks > 1 and machine.network_bytes_per_second == float("inf"):
        notes.append(
            "machine.network is not given: what other ranks keep costs no time to reach. Give the network's rate."
        )
    if sweep.scenario.batch_size < most_ranks:
        notes.append(
            f"A global batch has {format_count(sweep.scenario.batch_size, 'sample')}, fewer than {most_ranks:,} ranks: "
            "some of them get none."
        )
    return notes


def _tables(answer: Answer, sweep: Sweep, decimals: int) -> list[Table]:
    priced = any(row.price is not None for row in answer.rows)
    columns = ["ranks", "staging", "memory", "local disk", "policy", "runs today"]
    columns += ["run (s)", "over bound", "stall (s)", "from store"]
    rows = [_cells(row, answer, priced, decimals) for row in answer.rows]
    tables = [Table(f"{sweep.scenario.name}", [*columns, *(["price"] if priced else []), ""], rows)]
    if answer.front:
        cells = [_cells(row, answer, priced, decimals) for row in answer.front]
        tables.append(
            Table("Price against time: no other one is cheaper and as fast", [*columns, "price", ""], cells)
        )
    return tables


def _cells(row: Row, answer: Answer, priced: bool, decimals: int) -> list[str]:
    outcome = row.outcome
    mark = "cheapest" if row == answer.cheapest else "within" if row in answer.sufficient else ""
    if row in answer.least:
        mark = "least"
    missing = "N/A" if outcome.status == "not supported" else "failed"
    return [
        str(row.point.ranks),
        _size(row.point.staging_bytes),
        _size(row.point.memory_bytes),
        _size(row.point.local_disk_bytes),
        row.policy,
        "yes" if row.not_runnable_reason is None else "no",
        missing if outcome.run_seconds is None else f"{outcome.run_seconds:,.2f}",
        "" if row.slowdown is None else f"{100 * row.slowdown:.2f} %",
        "" if outcome.stall_seconds is None else f"{outcome.stall_seconds:,.2f}",
        "" if outcome.store_reads_share is None else f"{100 * outcome.store_reads_share:.1f} %",
        *([_priced(row, decimals)] if priced else []),
        mark,
    ]


def _size(size_bytes: int) -> str:
    from penstock.units import format_bytes

    return format_bytes(size_bytes) if size_bytes else "none"


def _priced(row: Row, decimals: int) -> str:
    return "" if row.price is None else f"{row.price:,.{decimals}f}"


def _verdict(answer: Answer, decimals: int) -> list[str]:
    notes = [
        f"Lower bound, {format_count(ranks, 'rank')}: "
        + ("unknown" if seconds is None else f"{seconds:,.2f} s")
        for ranks, seconds in sorted(
            {row.point.ranks: row.lower_bound_seconds for row in answer.rows}.items()
        )
    ]
    return [*notes, *_sentences(answer, decimals), *_of_loader(answer, decimals)]


def _sentences(answer: Answer, decimals: int) -> list[str]:
    notes = []
    asked = f"within {100 * answer.within:g} % of the lower bound"
    if answer.deadline_seconds != float("inf"):
        asked += f" and {answer.deadline_seconds:,.0f} s"
    if answer.cheapest is not None:
        notes.append(f"The cheapest {asked}: {_described(answer.cheapest, decimals)}.")
        notes += _slower(answer, answer.cheapest)
    elif answer.least:
        notes.append(f"No price is given. {asked.capitalize()}, and nothing can be taken away from:")
        notes += [f"  {_described(row, decimals)}" for row in answer.least]
        notes += _slower(answer, min(answer.least, key=lambda row: row.outcome.run_seconds or 0.0))
    elif answer.closest is not None:
        notes.append(f"None is {asked}. The closest: {_described(answer.closest, decimals)}.")
        notes += _slower(answer, answer.closest)
    else:
        notes.append(f"None is {asked}: no point could be run.")
    return notes


def _slower(answer: Answer, chosen: Row) -> list[str]:
    """Say how much longer the chosen number of ranks takes than the fastest, where no deadline rules that out."""
    fastest = answer.fastest
    if (
        answer.deadline_seconds != float("inf")
        or fastest is None
        or fastest.point.ranks == chosen.point.ranks
    ):
        return []
    times = (chosen.outcome.run_seconds or 0.0) / (fastest.outcome.run_seconds or float("inf"))
    return [
        f"With {format_count(chosen.point.ranks, 'rank')} the run takes {times:.2f} times as long as the fastest, "
        f"{fastest.outcome.run_seconds:,.2f} s with {format_count(fastest.point.ranks, 'rank')}: --deadline rules out "
        "what is too slow."
    ]


def _of_loader(answer: Answer, decimals: int) -> list[str]:
    """Say what of a sweep the loader of this version runs, and the best of that."""
    if answer.fastest is None:  # none of these could run at all, which is reported already
        return []
    if answer.of_loader is None:
        return ["The loader of this version runs all of these."]
    reasons = filter(None, dict.fromkeys(row.outcome.why_not_run for row in answer.rows))
    notes = [f"The loader of this version does not run all of these: {'; '.join(map(str, reasons))}."]
    chosen = [row for row in (answer.cheapest, *answer.least, answer.closest) if row is not None]
    if chosen and all(row.not_runnable_reason is None for row in chosen):
        return [*notes, "It runs what is named above."]
    if not answer.of_loader.rows:
        return [*notes, "It runs none of them."]
    return [*notes, "Of those that it runs today:", *_sentences(answer.of_loader, decimals)]


def _described(row: Row, decimals: int) -> str:
    point = row.point
    parts = [
        format_count(point.ranks, "rank"),
        f"staging {_size(point.staging_bytes)}",
        f"memory {_size(point.memory_bytes)}",
        f"local disk {_size(point.local_disk_bytes)}",
        row.policy,
    ]
    text = f"{', '.join(parts)}: {row.outcome.run_seconds or 0.0:,.2f} s"
    if row.slowdown is not None:
        text += f", {100 * row.slowdown:.2f} % over it"
    return text if row.price is None else f"{text}, for {_priced(row, decimals)}"


def _failures(answer: Answer) -> list[str]:
    reasons: dict[str, int] = {}
    for row in answer.rows:
        if row.outcome.reason:
            text = f"{row.policy}: {row.outcome.reason}"
            reasons[text] = reasons.get(text, 0) + 1
    notes = [f"{count} without a result, {text}" for text, count in list(reasons.items())[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        notes.append(f"{len(reasons) - _MOST_REASONS} more reasons are in the files.")
    return notes
