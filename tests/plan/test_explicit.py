"""Listed orders: where their ids come from, and that repeats are kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.spans import spans_of

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Explicit, Order, RepeatingOrder, explicit
from penstock.plan.serialise import read_plan
from penstock.trace.schema import SPAN, Kind


def epochs_of(order: Explicit, epochs: int) -> list[list[int]]:
    return [order.at(epoch, np.arange(order.length(epoch))).tolist() for epoch in range(epochs)]


@given(ids=st.lists(st.integers(0, 20), min_size=1, max_size=60))
def test_positions_are_those_that_a_scan_of_the_list_finds(ids: list[int]) -> None:
    order = Explicit(ids, samples=21)

    assert order.position_of(4, np.arange(21)).tolist() == [
        ids.index(s) if s in ids else -1 for s in range(21)
    ]
    assert isinstance(order, Order)
    assert isinstance(order, RepeatingOrder)


def test_one_list_serves_every_epoch() -> None:
    for ids in ([3, 1, 1], np.array([3, 1, 1], np.uint8), (3, 1, 1)):
        order = Explicit(ids, samples=4)
        assert epochs_of(order, 3) == [[3, 1, 1]] * 3


def test_lists_of_different_length_serve_an_epoch_each() -> None:
    assert epochs_of(Explicit([[3, 1, 1], [0]], samples=4), 2) == [[3, 1, 1], [0]]
    assert epochs_of(Explicit(np.array([[3, 1], [0, 2]]), samples=4), 2) == [[3, 1], [0, 2]]
    with pytest.raises(ConfigError, match="epoch 2 is asked of an order that lists 2 epochs"):
        Explicit([[3, 1, 1], [0]], samples=4).length(2)


def test_a_list_changed_after_it_was_given_does_not_change_the_order() -> None:
    ids = np.array([0, 1, 2])
    order = Explicit(ids, samples=3)

    ids[:] = 0

    assert epochs_of(order, 1) == [[0, 1, 2]]


def test_a_function_is_asked_per_epoch_and_not_for_every_question() -> None:
    asked = []

    def ids(epoch: int) -> list[int]:
        asked.append(epoch)
        return [epoch, epoch + 1]

    order = Explicit(ids, samples=100)

    assert epochs_of(order, 3) == [[0, 1], [1, 2], [2, 3]]
    assert order.position_of(1, [2]).tolist() == [1]
    assert asked == [0, 1, 2]


def test_ids_beyond_32_bits_survive() -> None:
    order = Explicit([10**12 - 1, 0], samples=10**12)

    assert epochs_of(order, 1) == [[10**12 - 1, 0]]
    assert order.position_of(0, [0, 5, 10**12 - 1]).tolist() == [1, -1, 0]


@pytest.mark.parametrize(
    ("text", "epochs"),
    [
        ("3\n1\n1\n", [[3, 1, 1]] * 2),
        ("3 1 1\n\n0, 2\n", [[3, 1, 1], [0, 2]]),
        ("3,1\n2,0\n", [[3, 1], [2, 0]]),
    ],
)
def test_a_text_file_holds_an_epoch_per_line_or_one_list(
    tmp_path: Path, text: str, epochs: list[list[int]]
) -> None:
    file = tmp_path / "ids.txt"
    file.write_text(text)

    assert epochs_of(Explicit.from_file(file, samples=4), 2) == epochs


def test_a_numpy_file_holds_a_list_or_a_row_per_epoch(tmp_path: Path) -> None:
    for ids, epochs in ((np.array([2, 0]), [[2, 0]] * 2), (np.array([[2, 0], [1, 1]]), [[2, 0], [1, 1]])):
        np.save(tmp_path / "ids.npy", ids)
        assert epochs_of(Explicit.from_file(tmp_path / "ids.npy", samples=3), 2) == epochs


def test_a_text_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("0 1\n2 three\n")

    with pytest.raises(ConfigError, match=r"ids\.txt: .*'three'; a list of ids holds integers"):
        Explicit.from_file(tmp_path / "ids.txt", samples=4)


class Weighted:
    """A sampler that draws with replacement, as torch's WeightedRandomSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(
            np.random.default_rng(self.epoch).choice(5, size=12, p=[0.6, 0.1, 0.1, 0.1, 0.1]).tolist()
        )

    def __len__(self) -> int:
        return 12


def test_a_sampler_is_drawn_once_per_epoch_with_its_repeats() -> None:
    expected = [
        np.random.default_rng(e).choice(5, size=12, p=[0.6, 0.1, 0.1, 0.1, 0.1]).tolist() for e in (0, 1, 2)
    ]

    order = Explicit.from_sampler(Weighted(), samples=5, epochs=3)

    assert epochs_of(order, 3) == expected


def test_an_endless_iterator_is_read_on_epoch_after_epoch() -> None:
    assert epochs_of(Explicit.from_sampler(count(), samples=9, epochs=3, horizon=3), 3) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


def test_a_horizon_cuts_an_iterable_that_begins_anew() -> None:
    assert epochs_of(Explicit.from_sampler(range(9), samples=9, epochs=2, horizon=4), 2) == [[0, 1, 2, 3]] * 2


def test_samplers_that_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match="count has no length, so an epoch of it has no end: pass horizon="):
        Explicit.from_sampler(count(), samples=9, epochs=1)
    with pytest.raises(ConfigError, match="horizon is 0; it must be at least 1"):
        Explicit.from_sampler(count(), samples=9, epochs=1, horizon=0)
    with pytest.raises(ConfigError, match=r"list yields something that is no id .*not of batches"):
        Explicit.from_sampler([[0, 1], [2, 3]], samples=9, epochs=1)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="list yields something that is no id"):
        Explicit.from_sampler([0.0, 1.0], samples=9, epochs=1)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="ids of epoch 1 have shape \\(0,\\); an epoch is a list of one id"):
        Explicit.from_sampler(iter([0, 1]), samples=9, epochs=2, horizon=2)
    with pytest.raises(ConfigError, match="ids of epoch 0 contain 9, which is outside"):
        Explicit.from_sampler(range(10), samples=9, epochs=1)
    with pytest.raises(ConfigError, match="ids of epoch 0 contain 4294967296, which is outside"):
        Explicit.from_sampler([2**32], samples=9, epochs=1)


@for_each(
    ("ids", "complaint"),
    [
        ([0, 4], r"ids of epoch 0 contain 4, which is outside \[0, 4\)"),
        ([[0], [-1]], r"ids of epoch 1 contain -1, which is outside \[0, 4\)"),
        ([0.0, 1.0], "ids of epoch 0 have dtype float64; they are integers"),
        ([True, False], "ids of epoch 0 have dtype bool; they are integers"),
        ([[0], []], r"ids of epoch 1 have shape \(0,\); an epoch is a list of one id or more"),
        (np.zeros((2, 2, 2), int), r"ids of epoch 0 have shape \(2, 2\); .*flatten batches"),
        ([], "ids list no epochs"),
    ],
)
def test_lists_that_are_no_ids_are_refused(ids: list[int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Explicit(ids, samples=4)


def test_a_function_is_asked_once_for_an_epoch_unless_its_answers_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan asks for every epoch's length, a policy for the run's reads, and then the run begins."""

    def times_asked(length: int) -> list[int]:
        asked: list[int] = []

        def ids(epoch: int) -> NDArray[np.int64]:
            asked.append(epoch)
            return np.arange(length)

        plan = AccessPlan(Explicit(ids, length), 4, epochs=10)
        plan.string(0)
        for _ in plan.batches(0, 0, 0):
            pass
        return [asked.count(epoch) for epoch in range(10)]

    assert times_asked(25) == [1] * 10
    monkeypatch.setattr(explicit, "_BYTES_KEPT", 9 * 25 * 4)
    assert max(times_asked(25)) > 1


def test_a_function_that_returns_no_ids_is_refused_when_it_is_asked() -> None:
    order = Explicit(lambda epoch: [0, 1 + epoch], samples=2)

    assert order.length(0) == 2
    with pytest.raises(ConfigError, match="ids of epoch 1 contain 2, which is outside"):
        order.length(1)


def span(kind: Kind, epoch: int, step: int, rank: int, sample: int, start: float) -> tuple[object, ...]:
    return (start, start + 1, sample, 100 * (kind != Kind.DECODE), epoch, step, kind, 0, 0, rank)


def test_a_recorded_run_is_read_again_step_by_step() -> None:
    """Epochs 2 and 3 of a resumed run; spans come in the order of their end, workers overtake each other."""
    spans = spans_of(
        [
            span(Kind.READ, 2, -1, 0, 7, 0.0),
            span(Kind.READ, 2, 0, 0, 4, 0.0),
            span(Kind.DECODE, 2, 1, 0, 2, 9.0),
            span(Kind.DECODE, 2, 0, 1, 5, 1.0),
            span(Kind.DECODE, 2, 0, 0, 3, 3.0),
            span(Kind.DECODE, 2, 0, 0, 4, 2.0),
            span(Kind.WAIT, 2, 0, 0, -1, 0.0),
            span(Kind.DECODE, 3, 0, 0, 2, 20.0),
            span(Kind.DECODE, 3, 0, 0, 2, 21.0),
        ]
    )

    assert epochs_of(Explicit.from_trace(spans, samples=8), 2) == [[4, 3, 5, 2], [2, 2]]


def test_a_recorded_run_of_groups_is_told_by_their_ids() -> None:
    """Two groups, the second loaded in two parts, a sample alone, and a group of another rank of the same flow."""

    def group(rank: int, step: int, sample: int, samples: int, flow: int, start: float) -> tuple[object, ...]:
        return (*span(Kind.DECODE, 0, step, rank, sample, start), samples, -1, flow)

    rows = [
        group(0, 0, 4, 3, 1, 2.0),
        group(0, 0, 5, 2, 2, 0.0),
        group(0, 0, 6, 1, 2, 3.0),
        group(0, 1, 3, 1, 0, 4.0),
        group(1, 0, 2, 2, 1, 0.0),
    ]
    ids = {(0, 1): np.array([4, 0, 1]), (0, 2): np.array([5, 7, 6]), (1, 1): np.array([2, 3])}

    order = Explicit.from_trace(spans_of(rows), 8, ids)

    assert epochs_of(order, 1) == [[5, 7, 6, 4, 0, 1, 2, 3, 3]]
    with pytest.raises(
        ConfigError, match="2 samples from 5 on were loaded by one call, and the trace does not say"
    ):
        Explicit.from_trace(spans_of(rows), 8)


def test_steps_that_were_loaded_together_are_told_apart() -> None:
    """Two ranks loaded steps 0 and 1 together, one of them in two parts, and step 2 by itself."""

    def loaded(rank: int, step: int, samples: int, flow: int, more: int) -> tuple[object, ...]:
        return (flow, flow + 1.0, 0, more, 0, step, Kind.DECODE, 0, 0, rank, samples, -1, flow)

    rows = [loaded(0, 0, 3, 1, 1), loaded(0, 0, 1, 2, 1), loaded(1, 0, 4, 1, 1), loaded(0, 2, 1, 3, 0)]
    ids = {(0, 1): [0, 1, 2], (0, 2): [3], (1, 1): [4, 5, 6, 7], (0, 3): [8]}
    spans, groups = spans_of(rows), {key: np.array(each) for key, each in ids.items()}

    assert epochs_of(Explicit.from_trace(spans, 9, groups), 1) == [[0, 1, 4, 5, 2, 3, 6, 7, 8]]
    written = {
        "samples": 9,
        "batch_size": 2,
        "epochs": 1,
        "ranks": 1,
        "order": None,
        "split": None,
        "drop_last": False,
    }
    plan, _ = read_plan(written, 0, spans[spans["rank"] == 0], groups)
    assert [plan.local_batch(0, 0, step).tolist() for step in range(3)] == [[0, 1], [2, 3], [8]]

    alone = [
        (*each[:2], sample, *each[3:])
        for sample in range(4)
        for each in [loaded(sample // 2, 0, 1, sample, 1)]
    ]
    assert epochs_of(Explicit.from_trace(spans_of(alone), 4), 1) == [[0, 2, 1, 3]]


def test_a_recorded_run_without_decoding_is_told_by_its_reads_and_hits() -> None:
    spans = spans_of(
        [
            span(Kind.HIT, 0, 1, 0, 6, 5.0),
            span(Kind.READ, 0, 0, 0, 1, 0.0),
            span(Kind.READ, 0, -1, 0, 7, 0.5),
            span(Kind.HIT, 0, 0, 0, 3, 1.0),
        ]
    )

    assert epochs_of(Explicit.from_trace(spans, samples=8), 1) == [[1, 3, 6]]


def test_a_trace_without_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="ids of epoch 0 have shape"):
        Explicit.from_trace(np.empty(0, SPAN), samples=8)


def test_threads_may_ask_a_function_order_at_once() -> None:
    order = Explicit(lambda epoch: np.random.default_rng(epoch).permutation(50), samples=50)
    wrong: list[int] = []

    def ask(start: int) -> None:
        for epoch in [(start + step) % 12 for step in range(60)]:
            ids = np.random.default_rng(epoch).permutation(50)
            if order.position_of(epoch, ids).tolist() != list(range(50)):
                wrong.append(epoch)

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
