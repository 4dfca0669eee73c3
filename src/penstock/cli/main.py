"""The command line."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from penstock.cli.bench import add_bench
from penstock.cli.cache import add_cache
from penstock.cli.calibrate import add_calibrate
from penstock.cli.check import add_check
from penstock.cli.compare import add_compare
from penstock.cli.decode_server import add_decode_server
from penstock.cli.doctor import add_doctor
from penstock.cli.explain import add_explain
from penstock.cli.graph import add_graph
from penstock.cli.options import parsed_amount
from penstock.cli.output import add_command, add_output_options, check_plot, needing, report_to, show
from penstock.cli.pack import add_pack
from penstock.cli.paper import add_paper
from penstock.cli.plan import add_plan
from penstock.cli.report import add_report
from penstock.cli.simulate import add_simulate
from penstock.cli.snapshots import add_snapshots
from penstock.cli.trace import add_trace
from penstock.cli.watch import add_watch
from penstock.errors import ConfigError, PenstockError, printable
from penstock.report import print_report
from penstock.units import parse_seconds

INTERRUPTED = 130

_OF_DEMO = """\
Example: penstock demo --data photos/train --epochs 3
JSON: results[] of PyTorch's loader, the prediction and Penstock's: loader, stall_seconds, stall_seconds_by_epoch[],
accuracy (null for the prediction).
"""
_OF_PS = """\
Example: penstock ps 4711 --follow
JSON: results[], how far the run is and its waits, a line each; with --follow a document on each line.
"""
_OF_COMPILE = """\
Example: penstock compile
JSON: results[] of what, folder (where it is kept), was_compiled (before).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 after an error message or for what was found, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale may have no letter for what is printed; Python escapes it on standard error alone.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if words[:2] == ["trace", "blocks"]:
            # It passes on a command with options of its own, and its exit status.
            from penstock.cli.blocks import main_blocks

            main_blocks(words[2:])
            return 0
        if words[:1] == ["catalog"]:
            raise ConfigError(
                "`penstock catalog` is `penstock cache list`, and with --clear `penstock cache clear`"
            )
        options, others = _parser().parse_known_args(words)
        if others:  # with the usage of the command, not of all
            options.parser.error(f"unrecognized arguments: {' '.join(others)}")
        check_plot(options)
        return options.run(options) or 0
    except BrokenPipeError:
        # Whoever read the output, head for example, has seen enough; nor shall the interpreter try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PenstockError as error:
        print_report(str(error))
        return 1
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print_report(f"{where}{error.strerror or error}")
        return 1
    except MemoryError as error:
        summary = f": {printable(str(error))}" if str(error) else ""
        print(
            f"penstock: not enough memory{summary}; ask for fewer samples, ranks or epochs", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return INTERRUPTED


class _ShowVersion(argparse.Action):
    """Looks the version up when it is asked for: it is in what pip installed, which may just be at work."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"penstock {version('penstock')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Training input, computed ahead.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    summary = "train against PyTorch's loader on a slow store, and compare"
    demo = add_command(commands, "demo", _demo, summary, epilog=_OF_DEMO)
    demo.add_argument(
        "--data", type=Path, metavar="DIR", help="an image folder (default: handwritten digits)"
    )
    demo.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("demo-out"),
        help="where the plot is written (%(default)s)",
    )
    demo.add_argument("--epochs", type=int, metavar="E", default=12, help="epochs to train (%(default)s)")
    add_output_options(demo, plot=False)

    add_calibrate(commands)
    add_bench(commands)

    add_doctor(commands)

    summary = "print how far a running training is, and what it waits for"
    waits = add_command(commands, "ps", _ps, summary, epilog=_OF_PS)
    waits.add_argument("pid", type=int, metavar="PID", help="process id of the training")
    waits.add_argument("--follow", action="store_true", help="ask again and again, until the training ends")
    waits.add_argument("--period", metavar="TIME", default="1s", help="time between answers (%(default)s)")
    add_output_options(waits, plot=False)

    summary = "compile kernels ahead, all but small ones, as for a container's image"
    compiled = add_command(commands, "compile", _compile, summary, epilog=_OF_COMPILE)
    add_output_options(compiled, plot=False)

    add_cache(commands)
    add_check(commands)
    add_decode_server(commands)
    add_pack(commands)
    add_plan(commands)
    add_compare(commands)
    add_explain(commands)
    add_graph(commands)
    add_report(commands)
    add_simulate(commands)
    add_snapshots(commands)

    add_trace(commands)
    add_watch(commands)
    add_paper(commands)
    return parser


def _demo(options: argparse.Namespace) -> None:
    with needing("the demo", "demo"):
        from penstock.measure.demo import run_demo
    from rich.console import Console

    if options.epochs < 1:
        raise ConfigError(f"--epochs is {options.epochs}; train for at least one")
    runs = run_demo(options.data, options.out, options.epochs, Console(markup=False, stderr=options.json))
    results = [
        {
            "loader": run.name,
            "stall_seconds": run.stall_seconds,
            "stall_seconds_by_epoch": [epoch.stall_seconds for epoch in run.epochs],
            "accuracy": run.accuracy,
        }
        for run in runs
    ]
    show(options, {"results": results}, [])


def _ps(options: argparse.Namespace) -> None:
    from penstock.flow import waits

    period = parsed_amount("--period", parse_seconds, options.period)
    lines = waits.ask_waits(options.pid).splitlines()
    if not options.follow:
        show(options, {"results": lines}, [], lines)
        return
    clears = "\x1b[H\x1b[J" if sys.stdout.isatty() and not options.json else ""
    try:
        while True:
            # In one piece, so that a terminal does not flicker.
            text = json.dumps({"results": lines}) if options.json else "\n".join(map(printable, lines))
            print(f"{clears}{text}", flush=True)
            time.sleep(period)
            lines = waits.ask_waits(options.pid).splitlines()
    except ConfigError:  # it has ended: an answer came before
        report_to(options)(f"process {options.pid} runs no loader any more")


def _compile(options: argparse.Namespace) -> None:
    from penstock.checkpoint.codecs import ours
    from penstock.compiling import Part, compile_ahead
    from penstock.flow.cpus import most_compilers
    from penstock.flow.engine import DECISIONS
    from penstock.flow.sums import SUMS
    from penstock.loader.draws import DRAW, SHUFFLE
    from penstock.loader.gather import GATHER
    from penstock.loader.prediction import CLOCK
    from penstock.loader.transforms import compiled
    from penstock.ranks.mpi_calls import CALL_MPI
    from penstock.store.direct import READ_SAMPLES
    from penstock.store.files import READ_FILES
    from penstock.store.listing import STAT_FILES
    from penstock.store.packed import READ_PIECES
    from penstock.store.tfrecords import INDEX_EXAMPLES

    # What takes longest first, so that processes end at about the same time.
    parts = (
        CLOCK,
        *ours.KERNELS.values(),
        *compiled.KERNELS.values(),
        *compiled.GROUP_KERNELS.values(),
        *compiled.CROP_KERNELS.values(),
        DECISIONS,
        READ_FILES,
        READ_PIECES,
        READ_SAMPLES,
        INDEX_EXAMPLES,
        STAT_FILES,
        CALL_MPI,
        GATHER,
        SHUFFLE,
        DRAW,
        SUMS,
    )
    report = report_to(options)
    were_compiled = [part.is_cached for part in parts]
    for part, was_compiled in zip(parts, were_compiled, strict=True):
        kept, note = part.folders.kept, part.folders.note
        if was_compiled:
            report(f"already compiled: {part.what}")
        elif note or kept is None:
            raise ConfigError(
                f"{note or 'no folder can be written'}: give a folder that can be, as PENSTOCK_CACHE"
            )

    def report_compiled(part: Part) -> None:
        report(f"compiled {part.what}, kept in {part.folders.kept}")

    compile_ahead(parts, most_compilers(), report_compiled, report)
    results = [
        {"what": part.what, "folder": str(part.folders.kept), "was_compiled": was_compiled}
        for part, was_compiled in zip(parts, were_compiled, strict=True)
    ]
    show(options, {"results": results}, [])
