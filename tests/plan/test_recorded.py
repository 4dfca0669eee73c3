"""Groups of which the plan tells the samples are read as those that they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.spans import spans_of

from penstock.flow.groups import is_planned
from penstock.measure.recorded import open_run
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Mixture, Order, TorchDistributed
from penstock.plan import recorded as module
from penstock.plan.recorded import RecordedPlan, with_planned_ids
from penstock.plan.serialise import is_told, told_plan, write_plan
from penstock.policy.scheduler import Load
from penstock.trace import JSON, NO_PLACE, Kind, Trace, TraceWriter
from penstock.trace.schema import AS_PLANNED

RANK = 1
#: Some come twice in an epoch, or in a batch.
ORDERS: list[Order] = [
    FullShuffle(23, seed=3),
    BundleShuffle(23, seed=5, bundle_ratio=0.3),
    TorchDistributed(23, ranks=5, seed=4),
    Mixture((3, 20), [(0, [0.7, 0.3])], at_end="repeat", seed=4, batch_size=7),
]


@settings(max_examples=200)
@given(st.data())
def test_a_group_that_a_load_says_is_planned_is_read_as_its_samples(data: st.DataObject) -> None:
    """Whole batches, parts of them, and some steps that were loaded together; epochs without end."""
    order, split = data.draw(st.sampled_from(ORDERS)), data.draw(st.sampled_from(["balanced", "strided"]))
    plan = AccessPlan(order, 7, 2**31 - 1, ranks=2, split=split)
    assert is_told(plan)
    rows: list[tuple[Any, ...]] = []
    groups: dict[tuple[int, int], NDArray[np.int64]] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        epoch = data.draw(st.integers(0, 3))
        full = plan.length(epoch) // 7
        steps = data.draw(st.integers(1, full))
        step = data.draw(st.integers(0, full - steps))
        samples = np.concatenate([plan.local_batch(RANK, epoch, step + number) for number in range(steps)])
        begin = data.draw(st.integers(0, samples.size - 1))
        part = range(begin, data.draw(st.integers(begin + 1, samples.size)))
        load = Load(0, epoch, step, samples, 0, part, [], [], [], steps)
        if is_planned(load.ids, load):
            flow = len(rows) + 1 | AS_PLANNED
            about = (epoch, step, Kind.DECODE, NO_PLACE, 3, RANK, load.ids.size, -1, flow)
            rows.append((0.0, 1.0, int(load.ids[0]), 0, *about))
            groups[RANK, flow] = load.ids
    meta: dict[str, JSON] = {"plan": {**write_plan(plan), "epochs": None}, "rank": RANK}
    trace = Trace(spans_of(rows), meta, ids={(RANK, 99): np.array([5, 6])})

    read = with_planned_ids(trace).ids

    groups[RANK, 99] = np.array([5, 6])
    assert {key: ids.tolist() for key, ids in read.items()} == {
        key: ids.tolist() for key, ids in groups.items()
    }
    assert (RANK, 98) not in read


def test_groups_of_a_plan_that_is_not_known_are_known_by_their_first_samples() -> None:
    spans = spans_of([(0, 1, 4, 0, 9, 0, Kind.DECODE, NO_PLACE, 3, 0, 2, -1, AS_PLANNED + 1)])
    written = write_plan(AccessPlan(FullShuffle(6), 3, 2))

    for meta in (
        {},
        {"rank": 0},
        {"rank": 0, "plan": {"order": 3, "split": 3}},
        {"rank": 0, "plan": written},
    ):
        assert not RecordedPlan(meta, lambda: 9).ids(spans)
    spans["epoch"], spans["sample"] = 0, 7
    ids = RecordedPlan({"rank": 0, "plan": written}, lambda: 9).ids(spans)
    assert [group.tolist() for group in ids.values()] == [[7]]


def test_a_plan_is_read_once_for_all_pieces_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epochs may be tables: with a plan for each piece, a long run would take all memory."""
    plan, stream = (
        AccessPlan(TorchDistributed(24, ranks=2, seed=4), 6, 2, ranks=2, split="strided"),
        AccessPlan.stream,
    )
    batches = [(*divmod(number, 4), number + 1 | AS_PLANNED) for number in range(8)]
    groups = {(RANK, flow): plan.local_batch(RANK, epoch, step).tolist() for epoch, step, flow in batches}
    with TraceWriter(
        tmp_path / "a.trace", {"plan": {**write_plan(plan), "epochs": None}, "rank": RANK}
    ) as writer:
        for epoch, step, flow in batches:
            about = (epoch, step, Kind.DECODE, NO_PLACE, 3, RANK, 3, -1, flow)
            writer.append(spans_of([(0.0, 1.0, groups[RANK, flow][0], 0, *about)]))
    told, asked = [], []

    def counted(written: Any, last_epoch: int) -> AccessPlan | None:
        told.append(last_epoch)
        return told_plan(written, last_epoch)

    def counted_stream(self: AccessPlan, *place: int) -> NDArray[np.int64]:
        asked.append(place)
        return stream(self, *place)

    monkeypatch.setattr(module, "told_plan", counted)
    monkeypatch.setattr(AccessPlan, "stream", counted_stream)

    read = open_run(tmp_path / "a.trace").trace().ids

    assert {key: ids.tolist() for key, ids in read.items()} == groups
    assert told == [1]
    assert [place[:2] for place in asked] == [(RANK, 0), (RANK, 1)], "once for each epoch"
