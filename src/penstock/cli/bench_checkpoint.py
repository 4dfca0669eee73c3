"""`penstock bench checkpoint`: what saves cost a training, on slow and fast storage and through a burst buffer."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.checks import MOST_STEPS, check_model
from penstock.cli.bench_options import (
    add_peers_option,
    add_run_options,
    add_step_options,
    measure_and_show,
    peers_of,
    step_seconds_of,
)
from penstock.cli.options import parsed_size, refuse_together
from penstock.cli.output import Table, add_command, needing, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.bench.saving import SavingResults

_STATE, _MODEL_BATCH = "200 MB", 16
_NAMES = {"slow": "slow storage", "fast": "fast storage", "burst": "burst buffer"}
_DESCRIPTION = """\
Runs a training that saves every few steps: not at all, straight to slow and to fast storage by torch.save, PyTorch's
DCP and Penstock, and by Penstock to the fast storage, from which snapshots are drained to the slow one. Prints run
time, how long a save blocks the training and until it is durable, and what was written during the run and after it.
Steps take 100 ms and no processor, as on a GPU; the state is random numbers that change a little before each save, or
a model's. See docs/howto/bench.md.
"""
_EPILOG = """\
examples:
  penstock bench checkpoint --to /lustre/me --fast /local/nvme
  penstock bench checkpoint --to /lustre/me --fast /local/nvme --state-size 2GB --steps 100 --every 20
  penstock bench checkpoint --to /lustre/me --fast /local/nvme --model alexnet --peers none
  torchrun --nproc-per-node 4 --no-python penstock bench checkpoint --to /lustre/me --fast /nvme/me

JSON: to, fast, state_bytes, ranks, steps, every, left_out[], meaning; and results[] of saver (torch, dcp, penstock;
null without saves), place (slow, fast, burst), run_seconds, low and high (95 %), repeats, blocked_seconds and
durable_seconds (of a save), settled_seconds (after the run, until all is on the slow storage), written_bytes,
written_by.
"""


def add(commands: Any) -> None:
    summary = "save to slow and fast storage and through a burst buffer"
    parser = add_command(commands, "checkpoint", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("--to", type=Path, metavar="FOLDER", required=True, help="folder on the slow storage")
    parser.add_argument(
        "--fast", type=Path, metavar="FOLDER", required=True, help="folder on the fast storage"
    )
    parser.add_argument("--state-size", metavar="SIZE", help=f"size of the state, without a model ({_STATE})")
    add_step_options(parser, "model to train and save")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"steps of a run (default: up to {MOST_STEPS}, as --seconds allows, and two saves at least)",
    )
    parser.add_argument(
        "--every", type=int, metavar="STEPS", default=5, help="steps between saves (%(default)s)"
    )
    add_peers_option(parser, "torch, dcp", "other ways of saving")
    add_run_options(parser, 3, "sets --steps, and ends the repeats after two")


def _run(options: argparse.Namespace) -> None:
    from penstock.bench.savers import check_savers
    from penstock.bench.saving import ModelTraining, SyntheticTraining, Workload, measure_saving, ways_of

    refuse_together(options, "model", ["state_size", "step_seconds"])
    peers = peers_of(options)
    check_savers(peers)
    for name in ("to", "fast"):
        if not getattr(options, name).is_dir():
            raise ConfigError(f"--{name} {getattr(options, name)}: there is no such folder: make it first")
    workload: Workload
    if options.model is not None:
        check_model(options.model)
        with needing("--model", "torch"):
            workload = ModelTraining(options.model, _MODEL_BATCH)
    else:
        workload = SyntheticTraining(
            parsed_size("--state-size", options.state_size or _STATE), step_seconds_of(options)
        )
    measure = partial(
        measure_saving,
        options.to,
        options.fast,
        workload,
        peers=peers,
        steps=options.steps,
        every=options.every,
    )
    measure_and_show(options, "saving", len(ways_of(peers)), measure, _show)


def _show(options: argparse.Namespace, found: SavingResults) -> None:
    results = [
        {
            "saver": each.way.saver or None,
            "place": each.way.place or None,
            "run_seconds": each.run_seconds.median,
            "low": each.run_seconds.low,
            "high": each.run_seconds.high,
            "repeats": each.run_seconds.repeats,
            "blocked_seconds": each.blocked_seconds,
            "durable_seconds": each.durable_seconds,
            "settled_seconds": each.settled_seconds,
            "written_bytes": each.flow.total_bytes,
            "written_by": each.flow.place,
        }
        for each in found.results
    ]
    data = {
        "to": str(options.to),
        "fast": str(options.fast),
        "state_bytes": found.state_bytes,
        "ranks": found.ranks,
        "steps": found.steps,
        "every": options.every,
        "left_out": found.left_out,
        "meaning": found.meaning,
        "results": results,
    }
    rows = []
    for each in found.results:
        during = each.flow.before(each.last_run_seconds)
        cells = ["", "", ""]
        if each.way.saver:
            cells = [format_seconds(each.blocked_seconds), format_seconds(each.durable_seconds)]
            cells.append(format_seconds(round(each.settled_seconds, 3)))
        rows.append(
            (
                f"{each.way.saver}, {_NAMES[each.way.place]}" if each.way.saver else "no saves",
                format_seconds(each.run_seconds.median),
                *cells,
                format_bytes(during),
                format_bytes(each.flow.total_bytes - during),
                format_rate(float(each.flow.rates.max(initial=0.0))),
            )
        )
    columns = ("", "run", "blocked", "durable", "done after", "written during", "written after", "at most")
    title = f"{format_count(found.saves, 'save')} of {format_bytes(found.state_bytes)} in {found.steps} steps"
    title += f" by {found.ranks} ranks" if found.ranks > 1 else ""

    def draw() -> Any:
        from penstock.bench.pictures import draw_saving

        return draw_saving(found)

    notes = [f"{line[0].upper()}{line[1:]}." for line in found.left_out]
    notes.append(f"Blocked and durable: of a save; written: what {found.results[-1].flow.place} moved.")
    show(options, data, [Table(title, columns, rows)], [*notes, found.meaning], draw)
