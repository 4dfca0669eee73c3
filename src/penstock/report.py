"""Printing a line that Penstock reports by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigError, printable


def checked_report(report: Any) -> Callable[[str], None] | None:
    """Return what lines are reported to; None for silence. Raises: ConfigError."""
    if report is not None and not callable(report):
        raise ConfigError(
            f"report is {report!r:.80}; give a function that takes a line, such as print, or None for silence"
        )
    return report  # type: ignore[no-any-return]


def print_report(line: str) -> None:
    """Print a line to standard error, with Penstock's name before it. What no terminal shows is escaped."""
    print(f"penstock: {printable(line)}", file=sys.stderr, flush=True)
