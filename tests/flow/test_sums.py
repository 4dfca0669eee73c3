"""The compiled loop over spans finds what NumPy does, to the bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock import compiling
from penstock.compiling import PARTS, Part
from penstock.flow import _sums, sums
from penstock.flow.sums import SIGNATURE, SUMS, Sums
from penstock.trace import NO_PEER, SOURCE, SPAN, Kind, Spans, epoch_metrics

#: What a run of a loader has: few samples, flows and batches, so that they often are the same.
KINDS = [*2 * [Kind.WAIT, Kind.DECODE], Kind.STEP, Kind.READ, Kind.HIT, Kind.SLOT, Kind.START, Kind.LOCK, 200]


@st.composite
def some_spans(draw: st.DrawFn, most: int = 60) -> Spans:
    count = draw(st.integers(0, most))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))

    def any_of(*values: int) -> NDArray[np.int64]:
        return random.choice(np.array(values), count)

    spans = np.zeros(count, SPAN)
    spans["kind"] = any_of(*KINDS)
    # Times that often are equal, and sums that depend on the order of adding.
    spans["start"] = random.integers(0, 40, count) / 7
    spans["end"] = spans["start"] + any_of(0, 1, 3, 10) / 3
    spans["sample"], spans["flow"], spans["samples"] = (
        any_of(-1, 0, 1, 2),
        any_of(0, 1, 2, 3),
        any_of(0, 1, 5),
    )
    spans["epoch"], spans["step"] = (
        any_of(*draw(st.sampled_from([(0,), (3, 4), (-1, 0, 7)]))),
        any_of(-1, 0, 1, 2, 3),
    )
    spans["step"] = np.maximum(
        spans["step"], np.where(spans["kind"] == Kind.DECODE, 0, -1)
    )  # always for a batch
    spans["bytes"] = np.where(spans["kind"] == Kind.DECODE, any_of(0, 1, 2), any_of(0, 4096, 2**60))
    spans["place"], spans["peer"] = any_of(SOURCE, 1, 2, -128), any_of(NO_PEER, 3)
    spans["worker"], spans["rank"] = (
        any_of(0, 1, 65_535),
        any_of(*draw(st.sampled_from([(0,), (0, 2**32 - 1)]))),
    )
    return spans


@pytest.fixture(scope="module", params=["plain", "compiled"])
def found_by_loop(request: pytest.FixtureRequest) -> Callable[[Spans, Spans], object]:
    """One for all examples: its memory is used again."""
    return partial(Sums().found_by, _sums.sum_spans if request.param == "plain" else SUMS.wait())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # which a hash is made by
@settings(max_examples=400)
@given(some_spans(), some_spans(20))
def test_the_loop_over_spans_finds_the_same_sums_as_numpy(
    found_by_loop: Callable[[Spans, Spans], object], spans: Spans, loaded: Spans
) -> None:
    found = found_by_loop(spans, loaded)

    assume(found is not None)  # few keys of many spans
    assert found == epoch_metrics(spans, loaded)


def test_what_the_loop_does_not_know_is_left_to_numpy() -> None:
    beside, apart, long = np.zeros((3, 2), SPAN)
    beside["kind"], apart["epoch"], long["kind"] = Kind.WRITE, (0, 10**6), Kind.DECODE
    long["bytes"] = 2**40

    for spans in (beside, apart, long):
        assert Sums().found_by(_sums.sum_spans, spans, spans[:0]) is None
        assert Sums()(spans, spans[:0]) == epoch_metrics(spans)
    assert Sums(stages=1).found_by(_sums.sum_spans, np.array([beside[0], long[0]])[1:], long[:0]) is None


def test_where_many_spans_have_one_key_numpy_does_it() -> None:
    spans = np.zeros(600, SPAN)
    spans["kind"][::3], spans["kind"][1::3], spans["kind"][2::3] = Kind.READ, Kind.DECODE, Kind.WAIT
    spans["samples"] = 1  # all of sample 0

    assert Sums().found_by(_sums.sum_spans, spans, spans[:0]) is None


def test_without_a_loader_nothing_is_compiled_and_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("penstock.flow._sums_kernels", "sum_spans", SIGNATURE, "nothing", "NumPy does it")
    monkeypatch.setattr(part, "_files", [tmp_path / "absent"])
    monkeypatch.setattr(part, "_file", tmp_path / "absent")
    monkeypatch.setattr(
        compiling, "_LEASES", weakref.WeakSet()
    )  # a loader of another test may be there still
    monkeypatch.setattr(sums, "SUMS", part)
    monkeypatch.setattr(sums, "_WORTH_COMPILING_SPANS", 0)
    for name in ("wait", "_run", "_compile"):
        monkeypatch.setattr(part, name, lambda: pytest.fail("it compiles"))
    spans = np.zeros(2, SPAN)

    try:
        assert Sums()(spans, spans[:0]) == epoch_metrics(spans)
    finally:
        PARTS.remove(part)
