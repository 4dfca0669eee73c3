"""The fuzzer of hostile snapshots runs, finds what it should, and finds nothing in what there is."""

from __future__ import annotations

import pytest
from tests.checkpoint.fuzz_snapshots import files_of, loop, restore, run

from penstock.checkpoint.files import reading
from penstock.checkpoint.files.parts import PartReader
from penstock.checkpoint.state.tensors import Bytes


def test_without_edits_all_is_restored() -> None:
    files = files_of(b"\xff")
    assert sorted(files) == ["step-000000000001", "step-000000000002"]
    assert restore(files) == 0


def test_a_manifest_of_any_text_is_refused() -> None:
    assert run(b"\x00{}") == 1
    assert run(b"\x00\xff\xff[") == 1


@pytest.mark.slow
def test_a_mistake_that_is_put_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody looked to which block a repeat points."""

    def original(part: PartReader, block: int, payload: Bytes) -> int:
        return int.from_bytes(payload.tobytes(), "little")

    monkeypatch.setattr(reading, "_original", original)
    with pytest.raises((IndexError, OverflowError)) as raised:
        loop(100.0, seed=1)

    (note,) = raised.value.__notes__
    assert note.startswith("the input: ")
    with pytest.raises(type(raised.value)):
        run(bytes.fromhex(note.removeprefix("the input: ")))


@pytest.mark.slow
def test_nothing_is_found_in_some_seconds() -> None:
    tried, kept, pairs = loop(20.0, seed=2)

    assert tried > 100
    assert kept > 10
    assert pairs > 300
