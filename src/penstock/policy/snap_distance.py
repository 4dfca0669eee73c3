"""How many snapshots follow a baseline before the next: a fixed number, or as many as the sizes so far make worth.

Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots",
Journal of Parallel and Distributed Computing 133, 2019: "the paper" below. Its section 3.3.1 asks for small distances
in the initial training, where weights change most, and larger ones near convergence, and leaves open how to find them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.policy.delta_schemes import Scheme, needed_to_restore, reference_within
from penstock.policy.retention import StoredSnapshot
from penstock.units import format_bytes, is_integer
from penstock.validate import check_count, is_number

#: Of a state's bytes: so much may be in tensors that are new, gone or of another shape before a baseline comes.
_MOST_CHANGED_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class AutoDistance:
    """A baseline when another difference is not worth it, judged by what was stored since the last one.

    Progressive: the differences do not grow, so the fewer baselines the fewer bytes are written; what grows is what a
    restore reads. A baseline comes when that would be more than `restore_ratio` times a baseline. So it comes early
    while differences are nearly as large as baselines, and late near convergence.

    Chain: a difference to the baseline grows with every snapshot. A baseline comes when the next difference is expected
    to be larger than the mean of what was stored since the last baseline, that one included; from there on the mean
    would rise. (The rule for replacing a machine whose housekeeping grows: when its next year costs more than its mean
    year. Source: Taylor, "A statistical theory of depreciation", Journal of the American Statistical Association
    18(144), 1923.) On two real trainings it writes 0.4 % and 2.2 % more than the best choice known in hindsight, the
    best fixed distance 1.1 % and 1.3 % more (tests/policy/test_snap_distance.py).

    Either: a baseline comes instead of a difference that would not be smaller.

    restore_ratio: what a restore may read and decode at most, in sizes of a baseline.
    most: snapshots from one baseline to the next at most; a damaged baseline costs all of them.
    useful_bytes: what the newest snapshot may need at most, all its files together, where storage is short.
    """

    restore_ratio: float = 6.0
    most: int = 100
    useful_bytes: int | None = None

    def __post_init__(self) -> None:
        if not is_number(self.restore_ratio) or not 2.0 <= self.restore_ratio < math.inf:
            raise ConfigError(
                f"restore_ratio is {self.restore_ratio!r}; a baseline and one difference can take 2: give that or more"
            )
        if not is_integer(self.most) or self.most < 1:
            raise _no_distance("most", self.most)
        if self.useful_bytes is not None:
            check_count("useful_bytes", self.useful_bytes)

    def longest(self, scheme: Scheme, baseline_bytes: int, delta_bytes: int) -> int:
        """Return the snapshots from one baseline to the next if all differences are of one size: an upper bound."""
        since = [baseline_bytes]
        while len(since) < self.most and self._is_worth(scheme, since, min(delta_bytes, baseline_bytes - 1)):
            since.append(min(delta_bytes, baseline_bytes - 1))
        return len(since)

    def _is_worth(self, scheme: Scheme, since_bytes: Sequence[int], expected_bytes: int) -> bool:
        """Return whether to add a difference of an expected size."""
        baseline_bytes, count = since_bytes[0], len(since_bytes)
        useful = expected_bytes + (sum(since_bytes) if scheme == "progressive" else baseline_bytes)
        grows_mean = scheme == "chain" and count > 1 and expected_bytes * count > sum(since_bytes)
        return (
            count < self.most
            and expected_bytes < baseline_bytes
            and not grows_mean
            and useful <= self.restore_ratio * baseline_bytes
            and (self.useful_bytes is None or useful <= self.useful_bytes)
        )


#: How far baselines are apart: so many snapshots, or as the sizes suggest.
SnapDistance = int | AutoDistance


def needs_baseline(changed_bytes: int, state_bytes: int) -> bool:
    """Return whether too much of a state is in tensors that a difference cannot describe.

    A few small tensors may come and go: each is stored in full where the reference lacks it.

    changed_bytes: of the tensors that are new, gone, or of another shape, type or part. state_bytes: of the new state.
    """
    return changed_bytes > _MOST_CHANGED_SHARE * state_bytes


def next_reference(scheme: Scheme, snap_dis: SnapDistance, since_bytes: Sequence[int]) -> int | None:
    """Return to which snapshot the next one is to be stored as a difference; None: it is to be a baseline.

    since_bytes: what was stored for the latest baseline and for each snapshot since, in their order; empty before the
        first, and where a baseline has to be: the tensors changed, or the last reference is damaged or gone.
    Returns: a place in `since_bytes`. For a fixed distance what `delta_schemes.reference_of` says.

    >>> next_reference("progressive", 3, [100, 60]), next_reference("chain", 3, [100, 60])
    (1, 0)
    >>> next_reference("progressive", 3, [100, 60, 60]) is None
    True
    """
    count = len(since_bytes)
    if not count or scheme == "complete":
        return None
    if isinstance(snap_dis, AutoDistance):
        is_worth = snap_dis._is_worth(scheme, since_bytes, _expected(scheme, since_bytes))
    elif snap_dis < 1:
        raise _no_distance("snap_dis", snap_dis)
    else:
        is_worth = count < snap_dis
    return reference_within(scheme, 0, count) if is_worth else None


def with_next(
    since: Sequence[StoredSnapshot],
    scheme: Scheme,
    snap_dis: SnapDistance,
    step: int,
    created_seconds: float,
    baseline_bytes: int,
    delta_bytes: int,
) -> tuple[StoredSnapshot, ...]:
    """Return the snapshots since the latest baseline, that one included, with the next one as the last.

    since: the same before it; empty where it has to be a baseline. step, created_seconds: of the next.
    baseline_bytes, delta_bytes: what is stored of the next one if it is a baseline, and if it is a difference.

    >>> since = with_next([], "progressive", 2, 10, 1.0, 100, 60)
    >>> [(one.step, one.reference_step) for one in with_next(since, "progressive", 2, 20, 2.0, 100, 60)]
    [(10, None), (20, 10)]
    """
    place = next_reference(scheme, snap_dis, [one.stored_bytes for one in since])
    if place is None:
        return (StoredSnapshot(step, created_seconds, baseline_bytes),)
    return (*since, StoredSnapshot(step, created_seconds, delta_bytes, since[place].step))


def _expected(scheme: Scheme, since_bytes: Sequence[int]) -> int:
    """Return the expected size of the next difference.

    A chain's delta keeps growing as it last did. Of the first nothing is known: it is tried, as one byte less than a
    baseline.
    """
    deltas = since_bytes[1:]
    if not deltas:
        return since_bytes[0] - 1
    growth = deltas[-1] - deltas[-2] if scheme == "chain" and len(deltas) > 1 else 0
    return deltas[-1] + max(0, growth)


# -- Table 10 ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """A distance, and why it."""

    snap_dis: int
    reason: str


def useful_bytes(scheme: Scheme, stored_bytes: Sequence[int], snap_dis: int) -> list[int]:
    """Return after each snapshot the bytes of all that it needs: "useful storage" (Table 9).

    stored_bytes: of each snapshot's own files, stored under this scheme and distance.
    """
    return [
        sum(stored_bytes[needed] for needed in needed_to_restore(scheme, snapshot, snap_dis))
        for snapshot in range(len(stored_bytes))
    ]


def best_snap_dis(
    scheme: Scheme,
    written_bytes: Mapping[int, int],
    useful_bytes: Mapping[int, int],
    storage_bytes: int | None = None,
) -> Advice:
    """Return which of several distances to use, as Table 10 of the paper advises.

    written_bytes: by distance, of all snapshots together. useful_bytes: by distance, the most that any one needs.
    storage_bytes: the storage constraint; None where there is none.
    Raises: ConfigError naming the least that is needed where nothing fits, or for the scheme "complete".
    """
    if scheme == "complete":
        raise ConfigError(
            "scheme is 'complete', in which every snapshot is a baseline: there is no distance to choose"
        )
    if not written_bytes or written_bytes.keys() != useful_bytes.keys():
        raise ConfigError(
            f"written bytes are given of snap_dis {sorted(written_bytes)}, useful bytes of {sorted(useful_bytes)}; "
            "both are needed of the same, of one at least"
        )
    fitting = [
        each for each in sorted(written_bytes) if storage_bytes is None or useful_bytes[each] <= storage_bytes
    ]
    if not fitting:
        least = min(sorted(useful_bytes), key=useful_bytes.__getitem__)
        raise ConfigError(
            f"storage_bytes is {storage_bytes}, and the least that can be is {useful_bytes[least]} at snap_dis {least} "
            f"({scheme}): give so much, or take the scheme chain or a smaller distance"
        )
    space = "" if storage_bytes is None else f" of those that fit {format_bytes(storage_bytes)}"
    if scheme == "progressive":
        chosen = fitting[-1]
        reason = f"the largest{space}: in the progressive scheme a larger one writes less"
    else:
        chosen = min(fitting, key=written_bytes.__getitem__)
        reason = f"the least written{space}: in the chain scheme differences grow with it, while baselines get fewer"
    needs = (
        f"{format_bytes(written_bytes[chosen])} written, {format_bytes(useful_bytes[chosen])} useful at most"
    )
    return Advice(chosen, f"{reason} ({needs})")


def _no_distance(field: str, value: int) -> ConfigError:
    return ConfigError(
        f"{field} is {value!r}; the first of at least 1 snapshots is a baseline: give an integer"
    )
