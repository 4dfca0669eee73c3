"""How far the listing of a large data set is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from penstock.errors import printable
from penstock.report import print_report
from penstock.units import format_count

#: A listing that is over by then shows nothing.
PATIENCE_SECONDS = 3.0
#: Lines come at this time and at twice the time of the last one; a bar is drawn so often.
_FIRST_LINE_SECONDS, _DRAWN_SECONDS = 5.0, 0.2


class ListingProgress:
    """Counts files, from any thread, and shows how many, in the thread that waits.

    place: what is listed. report: gets the lines.
    """

    def __init__(self, place: str, report: Callable[[str], None]) -> None:
        self._place, self._report = place, report
        #: Each thread appends how many files it has found, or learned the sizes of: no count is lost, without a lock.
        self.found: list[int] = []
        self.sized: list[int] = []
        #: How many sizes are wanted, once it is known; or shards are to be indexed.
        self.total: int | None = None
        self._is_of_shards = False
        self._began = time.monotonic()
        self._next_line = _FIRST_LINE_SECONDS
        self._has_terminal = report is print_report and sys.stderr.isatty()
        self._bar: Any = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> float:
        """Show where it is, if it is time; return after how many seconds it is."""
        seconds = self.seconds
        if self._has_terminal:
            if seconds < PATIENCE_SECONDS:
                return PATIENCE_SECONDS - seconds
            self._draw()
            return _DRAWN_SECONDS
        if seconds >= self._next_line:
            self._next_line = 2 * seconds
            self._report(f"listing {self._place} for {seconds:.0f} s: {self._line()}")
        return self._next_line - seconds

    def begin_shards(self, shards: int) -> None:
        """Count shards in `sized` from now on, and their members in `found`."""
        self.total, self._is_of_shards = shards, True

    def _line(self) -> str:
        if self._is_of_shards and self.total is not None:
            found = format_count(sum(self.found), "member")
            return f"{found} in {sum(self.sized):,} of {format_count(self.total, 'shard')}"
        if self.total is None:
            return f"{format_count(sum(self.found), 'file')} found"
        return f"sizes of {sum(self.sized):,} of {format_count(self.total, 'file')}"

    def _draw(self) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            text = TextColumn("{task.description}", markup=False)
            console = Console(stderr=True)
            self._bar = Progress(text, BarColumn(), console=console, transient=True, auto_refresh=False)
            self._bar.start()
            self._bar.add_task("")
        self._bar.update(
            self._bar.task_ids[0],
            description=printable(f"listing {self._place}: {self._line()}"),
            total=self.total,
            completed=sum(self.sized),
            refresh=True,
        )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
