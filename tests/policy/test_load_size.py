"""How many samples a Load takes, where a formula says how long each takes; and what a state takes of memory."""

from __future__ import annotations

import numpy as np
from tests.for_each import for_each

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.policy import decisions
from penstock.policy.decision_state import new_state, with_slots
from penstock.policy.decisions import State
from penstock.policy.placement import Kept


def state_of(local_batch: int, readers: int) -> State:
    """Return the state of a rank that has one sample and one slot."""
    disk = Curve.flat(1e8)
    return new_state(
        np.ones(1, np.int64),
        [Kept(np.empty(0, np.int64), np.empty(0, np.int8))],
        Machine(SharedStore(disk), (StorageClass("staging", 1, 1, disk),)),
        slots=1,
        local_batch=local_batch,
        readers=readers,
        undecoded_bytes=1,
    )


def settled(call_seconds: float, sample_seconds: float, most: int = 64) -> int:
    """Return the size after 100 Loads that cost so much for the call and for each sample, of `most` samples at most."""
    state = state_of(most, 0)
    for _ in range(100):
        samples = min(decisions.load_size(state, 0), most)
        decisions.learn_load_size(state, 0, samples, call_seconds + samples * sample_seconds)
    return min(decisions.load_size(state, 0), most)


@for_each("call_seconds", [0.1e-3, 0.5e-3, 0.6e-3, 1.5e-3, 4e-3, 100e-3])
def test_a_call_that_costs_much_is_made_for_many_samples(call_seconds: float) -> None:
    """As of a database. One sample a call would take as long as the whole batch does."""
    assert settled(call_seconds, 1e-6) == 64


@for_each(("sample_seconds", "samples"), [(40e-3, 1), (6e-3, 8), (2.4e-3, 20), (40e-6, 64)])
def test_where_samples_cost_a_load_is_50_milliseconds(sample_seconds: float, samples: int) -> None:
    assert settled(0.0, sample_seconds) == samples


def test_a_call_is_made_for_as_many_as_make_it_cheap_and_no_more() -> None:
    """8 samples a call take 0.75 of the time that 4 take each, 16 take 0.83 of that: from there on it is no gain."""
    assert settled(32e-3, 8e-3) == 8


def test_entries_that_were_never_used_are_pages_that_nobody_has_written() -> None:
    """32 readers with 4,096 tiny samples each could need 130,000 entries; few loaders ever use a tenth of them."""
    state = state_of(4096, 32)

    for each in (state, with_slots(state, 2)):
        pages = np.resize(each.ints, (each.ints.size // 512, 512))
        assert np.count_nonzero(pages.any(axis=1)) < 0.05 * len(pages)
