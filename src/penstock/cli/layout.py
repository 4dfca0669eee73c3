"""`penstock simulate layout`: sequential against random reads of the shared store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from penstock.cli.options import ORDERS, given, parsed
from penstock.cli.output import Table, add_command, add_output_options, progress, show
from penstock.cli.scenario import add_scenario_options, scenario_from
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.machine import Machine
    from penstock.simulate.layout import LayoutComparison, LayoutOption

_DESCRIPTION = """\
Compares ways to read a data set from the shared store, each sample by itself or neighbours together, and ways to write
it anew before the training, and says which pays. What a scattered read costs in addition to its bytes follows from the
machine's source: clients, sequential, random_read, request and latency (docs/howto/sequential-or-random.md).
"""
_EPILOG = """\
examples:
  penstock simulate layout scenario3 --sequential "500 MB/s"
  penstock simulate layout cats.toml --files --order bundle:0.01 --plot layout.png

JSON: scenario, order, epochs, counted_epochs, counted_share; sample_bytes, window_samples, neighbour_share,
request_seconds, sequential_bytes_per_second, hole_bytes; best; verdict[]; and results[] of name, epochs, once_seconds,
run_seconds, stored_bytes, break_even_epochs (or null), first_epoch and later_epoch (or null), each of how, requests,
read_bytes and seconds.
"""


def add(commands: Any) -> None:
    summary = "sequential against random reads, and whether to rewrite the data set"
    parser = add_command(commands, "layout", _run, summary, _DESCRIPTION, _EPILOG)
    add_scenario_options(parser)
    parser.add_argument("--order", metavar="NAME", help=f"{ORDERS} (full)")
    parser.add_argument("--files", action="store_true", help="each sample is a file of its own")
    parser.add_argument("--window", metavar="SIZE", help="bytes that a rank reads ahead (its staging buffer)")
    store = parser.add_argument_group("the store, in place of the machine's [source]")
    store.add_argument("--sequential", metavar="RATE", help="rate of consecutive reads, all clients together")
    store.add_argument(
        "--random-read", metavar="SIZE", help="size of the reads that `clients` was measured with"
    )
    store.add_argument(
        "--latency", metavar="TIME", help="latency of each read; those of several reads overlap"
    )
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from penstock.measure.plot_layout import draw_layout
    from penstock.plan.parse_order import OrderName
    from penstock.simulate.layout import compare_layouts, count_epochs
    from penstock.simulate.layout_verdict import verdict
    from penstock.units import parse_bytes

    scenario = scenario_from(options)
    machine = _machine(options, scenario.machine)
    plan = scenario.plan()
    order = options.order or "full"
    if options.order is not None:
        plan = replace(plan, order=OrderName(options.order).of(scenario.samples, scenario.seed))
    with progress("counting reads", count_epochs(plan)) as done:
        comparison = compare_layouts(
            plan,
            machine,
            scenario.sizes_bytes(),
            is_packed=not options.files,
            window_bytes=given(options, "window", parsed, parse_bytes),
            done=done,
        )
    show(
        options,
        {"scenario": scenario.name, "order": order, **_as_json(comparison)},
        [_table(f"{scenario.name}: {format_count(plan.ranks, 'rank')}, {order}", comparison)],
        [*verdict(comparison), *_caveats(comparison)],
        lambda: draw_layout(comparison),
    )


def _machine(options: argparse.Namespace, machine: Machine) -> Machine:
    from dataclasses import replace

    from penstock.machine import Curve
    from penstock.units import parse_bytes, parse_rate, parse_seconds

    def curve(text: str) -> Curve:
        return Curve.flat(parse_rate(text))

    written = {
        "sequential": given(options, "sequential", parsed, curve),
        "random_bytes": given(options, "random_read", parsed, parse_bytes),
        "latency_seconds": given(options, "latency", parsed, parse_seconds),
    }
    changes: dict[str, Any] = {field: value for field, value in written.items() if value is not None}
    if not changes:
        return machine
    source = machine.source
    if "sequential" in changes and source.clients is not None:
        # A flat rate for all clients is meant for as many as there are, not for those of a curve that go beyond it.
        changes["clients"] = Curve.flat(source.clients.at(machine.ranks))
    return replace(machine, source=replace(source, **changes))


def _table(title: str, comparison: LayoutComparison) -> Table:
    from penstock.simulate.layout_verdict import TITLES
    from penstock.units import format_bytes, format_seconds

    def row(option: LayoutOption) -> list[str]:
        epoch = option.first_epoch if option.later_epoch is None else option.later_epoch
        even = option.break_even_epochs
        return [
            TITLES[option.name] + (f" ({epoch.how})" if option.once_seconds else ""),
            f"{epoch.requests:,.0f}",
            format_bytes(epoch.read_bytes),
            format_seconds(option.once_seconds) if option.once_seconds else "",
            format_seconds(option.first_epoch.seconds),
            "" if option.later_epoch is None else format_seconds(option.later_epoch.seconds),
            format_seconds(option.run_seconds),
            "" if not option.once_seconds else "never" if even is None else f"epoch {even:,}",
        ]

    columns = ("", "requests", "read", "rewrite", "first epoch", "later epochs", "run", "pays from")
    return Table(title, columns, [row(option) for option in comparison.options])


def _caveats(comparison: LayoutComparison) -> list[str]:
    if comparison.counted_epochs == comparison.epochs and comparison.counted_share == 1.0:
        return []
    share = f"the first {100 * comparison.counted_share:.2g} % of " if comparison.counted_share < 1.0 else ""
    return [
        f"Counted in {share}{comparison.counted_epochs} of {comparison.epochs} epochs; they stand for the rest."
    ]


def _as_json(comparison: LayoutComparison) -> dict[str, Any]:
    from dataclasses import asdict

    from penstock.simulate.layout_verdict import verdict

    data = asdict(comparison)
    del data["options"], data["is_packed"]
    results = [asdict(option) | {"run_seconds": option.run_seconds} for option in comparison.options]
    return data | {"best": comparison.best.name, "verdict": list(verdict(comparison)), "results": results}
