"""Groups of which the plan tells the samples are read as those that they were."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.spans import spans_of

from penstock.flow.engine import _is_planned
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Mixture, Order, TorchDistributed
from penstock.plan.recorded import planned_ids, with_planned_ids
from penstock.plan.serialise import is_told, write_plan
from penstock.policy.scheduler import Load
from penstock.trace import JSON, NO_PLACE, Kind, Trace
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
        if _is_planned(load.ids, load):
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
        assert not planned_ids(meta, spans)
    spans["epoch"], spans["sample"] = 0, 7
    ids = planned_ids({"rank": 0, "plan": written}, spans)
    assert [group.tolist() for group in ids.values()] == [[7]]
