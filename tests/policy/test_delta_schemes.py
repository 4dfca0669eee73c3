"""Which snapshots' files are read and kept, against what the schemes say in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.policy.delta_schemes import Scheme, baseline_of, needed_to_restore, needed_to_save, reference_of

SNAPSHOTS, DISTANCES = st.integers(0, 200), st.integers(1, 30)


@given(SNAPSHOTS, DISTANCES)
def test_a_complete_snapshot_needs_nothing_but_itself(snapshot: int, snap_dis: int) -> None:
    assert needed_to_restore("complete", snapshot, snap_dis) == [snapshot]
    assert needed_to_save("complete", snapshot, snap_dis) == []
    assert reference_of("complete", snapshot, snap_dis) is None


@given(SNAPSHOTS, DISTANCES)
def test_a_progressive_snapshot_needs_all_since_its_baseline(snapshot: int, snap_dis: int) -> None:
    baseline = max(each for each in range(snapshot + 1) if each % snap_dis == 0)

    assert baseline_of(snapshot, snap_dis) == baseline
    assert needed_to_restore("progressive", snapshot, snap_dis) == list(range(baseline, snapshot + 1))
    assert needed_to_save("progressive", snapshot, snap_dis) == list(range(baseline, snapshot))


@given(SNAPSHOTS, DISTANCES)
def test_a_chained_snapshot_needs_its_baseline_and_itself(snapshot: int, snap_dis: int) -> None:
    baseline = max(each for each in range(snapshot + 1) if each % snap_dis == 0)

    assert needed_to_restore("chain", snapshot, snap_dis) == sorted({baseline, snapshot})
    assert needed_to_save("chain", snapshot, snap_dis) == [baseline] * (snapshot != baseline)


@given(st.sampled_from(["complete", "progressive", "chain"]), SNAPSHOTS, DISTANCES)
def test_what_the_next_snapshot_reads_is_still_kept_for_the_one_before(
    scheme: Scheme, snapshot: int, snap_dis: int
) -> None:
    kept = needed_to_restore(scheme, snapshot, snap_dis)

    assert set(needed_to_save(scheme, snapshot + 1, snap_dis)) <= set(kept)
    assert set(needed_to_restore(scheme, snapshot + 1, snap_dis)) <= {*kept, snapshot + 1}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="snap_dis is 0"):
        baseline_of(3, 0)
    with pytest.raises(
        ConfigError, match="scheme is 'delta'; the known ones are complete, progressive, chain"
    ):
        needed_to_restore("delta", 3, 2)  # type: ignore[arg-type]
