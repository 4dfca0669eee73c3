"""Loaders that start fewer threads than they do by default: 32 threads take half of what a small loader takes."""

from __future__ import annotations

import importlib
from typing import Any

READERS = 8


def start_few_readers() -> None:
    """Have loaders of this process start 8 threads that read, unless a test says how many."""
    setup: Any = importlib.import_module("penstock.loader.setup")
    setup.default_readers = lambda cpus: READERS
