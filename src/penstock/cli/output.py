"""How every command shows what it found: tables for people, JSON for programs, progress only where somebody looks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, printable
from penstock.report import print_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people: cells are text already; columns after the first are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    summary: str,
    description: str | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command to those of a parser; its texts are printed as they stand.

    run: returns the exit status where that is not 0. summary: by the list of commands.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_output_options(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Give a command --json and, where it can draw, --plot FILE."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg or .pdf)")


def check_plot(options: argparse.Namespace) -> None:
    """Refuse a --plot that no picture can be drawn into, before anything is computed for it.

    Raises: ConfigError for an ending that is none of a picture, a missing folder, or a missing matplotlib.
    """
    if getattr(options, "plot", None) is None:
        return
    with needing("--plot", "plot"):
        from penstock.measure.picture import check_picture

        try:
            check_picture(options.plot)
        except ConfigError as error:
            raise ConfigError(f"--plot {error}") from None


def show(
    options: argparse.Namespace,
    data: Any,
    tables: Sequence[Table],
    notes: Sequence[str] = (),
    draw: Callable[[], Figure] | None = None,
) -> None:
    """Print `data` as JSON where --json was given, else the tables, below them the notes and the picture's name.

    data: of dicts, lists, text, finite numbers and None alone. draw: returns the picture for --plot.
    """
    if draw is not None and options.plot is not None:
        from penstock.measure.picture import save_picture

        save_picture(draw(), options.plot)
    if options.json:
        print(json.dumps(data, indent=2, allow_nan=False))
        return
    for table in tables:
        print_table(table)
    for note in notes:
        print_line(note)
    plot = getattr(options, "plot", None)
    if plot is not None:
        print_line(f"The picture: {plot}")


def report_to(options: argparse.Namespace) -> Callable[[str], None]:
    """Return where a command reports what it does: standard output, or standard error where that is for JSON."""
    return print_report if options.json else print_line


def print_line(line: str) -> None:
    """Print a line on one line, whatever the names in it are."""
    print(printable(line))


def print_table(table: Table) -> None:
    """Print a table, as wide as it needs where the output is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    is_terminal = sys.stdout.isatty()
    shown = RichTable(
        title=printable(table.title) or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index else "left", no_wrap=not is_terminal)
    for row in table.rows:
        shown.add_row(*map(printable, row))
    Console(markup=False, highlight=False, width=None if is_terminal else 1000).print(shown)


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with how much of `total` is done; it draws a bar where standard error is a terminal.

    total: None if unknown; the bar then shows activity and elapsed time.
    """
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, TimeElapsedColumn

    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(printable(description)), total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def long_work(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function as `progress` does, for work that may take hours: with its rate, and how long it still takes.

    Its first call says how much was done before. Where standard error is no terminal it prints a line after 5, 10, 20 s
    and so on. unit: what is counted.
    """
    clock = _Clock(description, total, unit)
    if not sys.stderr.isatty():
        yield clock.print_now_and_then
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(printable(description)), total=total, rate="")
        yield lambda done: bar.update(task, completed=done, rate=escape(clock.line(done)))


class _Clock:
    """How far some work is, in words."""

    def __init__(self, description: str, total: int, unit: str) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._first: int | None = None
        self._began = time.monotonic()
        self._next_seconds = 5.0

    def line(self, done: int) -> str:
        from penstock.units import format_seconds

        if self._first is None:
            self._first, self._began = done, time.monotonic()
        seconds = time.monotonic() - self._began
        text = f"{done:,} of {self._total:,} {self._unit}"
        if done > self._first and seconds > 0:
            rate = (done - self._first) / seconds
            text += f", {rate:,.0f}/s, {format_seconds((self._total - done) / rate)} left"
        return text

    def print_now_and_then(self, done: int) -> None:
        line, seconds = self.line(done), time.monotonic() - self._began
        if seconds >= self._next_seconds:
            self._next_seconds = 2 * seconds
            print(f"{printable(self._description)}: {line}", file=sys.stderr)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path of a file or folder before an error about what is in it, unless the error has it already."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turn the absence of an optional package into an error that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs {error.name}, which is not installed: pip install 'penstock[{extra}]', or '.[{extra}]' in a "
            "checkout"
        ) from error
