"""Virtual time of several ranks, and compiled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.from_zero import views_from_zero

from penstock.kernel_cache import kept_loop
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle, Sequential
from penstock.policy import StagingLimits
from penstock.policy.placement import Kept, keep_by_frequency
from penstock.simulate import loading
from penstock.simulate.loading import Agreed, Run, run_in_virtual_time, steps_of
from penstock.trace import Kind

MEMORY = Curve.flat(1e12)


def machine(ranks: int, clients: Curve, *, tier_bytes: int = 0, tier_latency: float = 0.0) -> Machine:
    tiers = (
        [StorageClass("memory", tier_bytes, 1, MEMORY, latency_seconds=tier_latency)] if tier_bytes else []
    )
    return Machine(
        SharedStore(clients),
        (StorageClass("staging", 10**12, 1, MEMORY), *tiers),
        ranks,
        preprocess_bytes_per_second=1e6,
    )


def run(plan: AccessPlan, on: Machine, sizes: np.ndarray, limits: StagingLimits, step_seconds: float) -> Run:
    ranks = range(plan.ranks)
    capacities = [tier.capacity_bytes for tier in on.storage[1:]]
    read = steps_of(plan, ranks, plan.strings())
    return run_in_virtual_time(
        read,
        on,
        sizes,
        Agreed([keep_by_frequency(plan, rank, sizes, capacities) for rank in ranks]),
        limits,
        step_seconds=np.full(read.steps.size, step_seconds),
        has_spans=True,
    )


LIMITS = StagingLimits(slots=2, readers=2, decoders=1, undecoded_bytes=10**9)


def test_ranks_share_the_store() -> None:
    """Two ranks of four samples of 10,000 bytes: alone each takes 4 s of a store of 10,000 bytes/s, together 8 s."""
    plan = AccessPlan(Sequential(8), 8, 1, ranks=2)
    flat = Curve.flat(10_000.0)

    both = run(plan, machine(2, flat), np.full(8, 10_000), LIMITS, 0.0)
    alone = run(AccessPlan(Sequential(4), 4, 1), machine(1, flat), np.full(4, 10_000), LIMITS, 0.0)

    decoding = 0.01
    assert both.step_end_seconds == pytest.approx([8.0 + decoding])
    assert alone.step_end_seconds == pytest.approx([4.0 + decoding])
    assert both.reads.tolist() == [[4, 0, 0], [4, 0, 0]]
    assert both.store_bytes.tolist() == [40_000.0] * 2


def test_a_store_that_grows_with_its_clients_does_not_slow_them() -> None:
    plan = AccessPlan(Sequential(8), 8, 1, ranks=2)
    growing = Curve(((1, 10_000.0), (2, 20_000.0)))

    both = run(plan, machine(2, growing), np.full(8, 10_000), LIMITS, 0.0)

    assert both.step_end_seconds == pytest.approx([4.01])


def test_all_ranks_end_a_step_before_one_begins_the_next() -> None:
    """Rank 1 has the large samples: rank 0 waits for it after each step, and not for its own samples."""
    plan = AccessPlan(Sequential(8), 4, 1, ranks=2)
    sizes = np.array([100, 100, 10_000, 10_000, 100, 100, 10_000, 10_000])

    both = run(plan, machine(2, Curve(((1, 10_000.0), (2, 20_000.0)))), sizes, LIMITS, 1.0)

    waits = both.spans[both.spans["kind"] == Kind.WAIT]
    asked = {rank: waits["start"][waits["rank"] == rank].tolist() for rank in (0, 1)}
    assert asked[0] == asked[1] == pytest.approx([0.0, both.step_end_seconds[0]])
    assert both.step_stall_seconds[1, 0] == 0.0
    # Its decoder reads the first sample by itself, behind the two readers on the wire, and then decodes both.
    assert both.step_stall_seconds[0, 1] == pytest.approx(3.02)


def test_a_rank_whose_share_of_the_last_batch_is_nothing_sits_it_out() -> None:
    plan = AccessPlan(Sequential(5), 4, 1, ranks=2)

    both = run(plan, machine(2, MEMORY), np.full(5, 100), LIMITS, 1.0)

    assert both.reads.sum(axis=1).tolist() == [3, 2]
    assert (both.step_busy_seconds > 0).tolist() == [[True, True], [True, False]]


runs = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 60),
        "batch": st.integers(1, 16),
        "epochs": st.integers(1, 3),
        "ranks": st.integers(1, 3),
        "slots": st.integers(2, 4),
        "readers": st.integers(0, 4),
        "decoders": st.integers(1, 3),
        "tier": st.integers(0, 3000),
        "tier_latency": st.sampled_from([0.0, 0.01]),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=30)
@given(runs)
def test_compiled_time_is_that_of_plain_python(case: dict[str, float]) -> None:
    """And each rank gets each of its samples once an epoch, from the store or a tier. No index is negative."""
    loop = kept_loop(loading.KERNELS, "run", loading.RUN, compiles=True)
    ranks, samples = int(case["ranks"]), int(case["samples"])
    plan = AccessPlan(
        FullShuffle(samples, int(case["seed"])), int(case["batch"]), int(case["epochs"]), ranks=ranks
    )
    on = machine(
        ranks, Curve.flat(20_000.0), tier_bytes=int(case["tier"]), tier_latency=float(case["tier_latency"])
    )
    sizes = np.random.default_rng(int(case["seed"])).integers(50, 200, samples)
    limits = StagingLimits(int(case["slots"]), int(case["readers"]), int(case["decoders"]), 1000)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "views_of", views_from_zero)
        for each in (None, loop):
            patch.setattr(loading, "_compiled", lambda _reads, each=each: each)
            found.append(run(plan, on, sizes, limits, 0.001))

    plain, compiled = found
    assert np.array_equal(plain.spans, compiled.spans)
    for name in (
        "step_end_seconds",
        "step_stall_seconds",
        "step_busy_seconds",
        "reads",
        "store_bytes",
        "fill_reads",
    ):
        assert np.array_equal(getattr(plain, name), getattr(compiled, name))
    assert plain.reads.sum(axis=1).tolist() == [plan.reads(rank) for rank in range(ranks)]


def test_many_spans_are_taken_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AccessPlan(FullShuffle(50, 0), 8, 2)
    sizes = np.full(50, 100)
    whole = run(plan, machine(1, Curve.flat(1e4)), sizes, LIMITS, 0.001).spans

    monkeypatch.setattr(loading, "_LOOSE_SPANS", 3)

    assert np.array_equal(run(plan, machine(1, Curve.flat(1e4)), sizes, LIMITS, 0.001).spans, whole)


def test_nothing_is_kept_where_nothing_is_said_to_be() -> None:
    plan = AccessPlan(Sequential(4), 2, 2)
    nothing = Kept(np.empty(0, np.int64), np.empty(0, np.int8))
    read = steps_of(plan, [0], [plan.string(0)])

    once = run_in_virtual_time(
        read,
        machine(1, MEMORY, tier_bytes=10**6),
        np.full(4, 100),
        Agreed([nothing]),
        LIMITS,
        step_seconds=np.zeros(4),
    )

    assert once.reads.tolist() == [[8, 0, 0]]
    assert once.spans.size == 0
