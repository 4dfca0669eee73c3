"""The garbage collector kept away, and let in again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.flow.garbage import no_collection


@pytest.fixture(params=["on", "off"])
def was_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param == "on" else gc.disable)()
    yield gc.isenabled()
    (gc.enable if before else gc.disable)()


def test_nothing_is_collected_meanwhile_and_the_collector_is_as_it_was(was_enabled: bool) -> None:
    collected: list[str] = []
    gc.callbacks.append(lambda phase, _: collected.append(phase))
    try:

        @no_collection
        def made() -> list[list[int]]:
            kept = [[number] for number in range(100_000)]
            assert not collected
            return kept

        kept = made()
        assert len(kept) == 100_000
        assert gc.isenabled() == was_enabled

        with pytest.raises(IndexError):
            no_collection(kept.pop)(len(kept))
        assert gc.isenabled() == was_enabled
    finally:
        gc.callbacks.pop()
