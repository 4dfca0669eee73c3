"""Printing a line that Penstock reports by itself."""

from __future__ import annotations

import sys

from penstock.errors import printable


def print_report(line: str) -> None:
    """Print a line to standard error, with Penstock's name before it. What no terminal shows is escaped."""
    print(f"penstock: {printable(line)}", file=sys.stderr, flush=True)
