"""How much a save does besides the bytes: the calls that one small tensor costs, counted on all threads."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import penstock
from penstock.checkpoint import SnapshotStore

_SOURCES = str(Path(penstock.__file__).parent)
#: Of Python functions, generators included, in Penstock; newer Pythons make fewer, for they inline comprehensions.
MOST_CALLS = 185


def test_a_small_save_makes_few_calls(tmp_path: Path) -> None:
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCES):
            calls.append(frame.f_code.co_qualname)

    state = {"w": torch.zeros(4)}
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(0, state).wait()
        threading.setprofile(count)
        sys.setprofile(count)
        try:
            store.save(1, state).wait()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    assert 100 < len(calls) <= MOST_CALLS, calls
