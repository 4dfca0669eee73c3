"""What a store says, and when, where a user gave it what it cannot use or where something is not as it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import opened, same, training

from penstock.checkpoint.wire import Refresher
from penstock.errors import ConfigError
from penstock.policy.keeping import Keep

# -- Arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scheme": "foo"}, "scheme is 'foo'; the known ones are complete, progressive, chain"),
        ({"keep": 3}, r"keep is 3; .* give Keep\(last=3\)"),
        ({"snap_dis": 0}, "snap_dis is 0"),
        ({"snap_dis": "often"}, "snap_dis is 'often'"),
        ({"snap_dis": 2.5}, r"snap_dis is 2\.5"),
        ({"snap_dis": True}, "snap_dis is True"),
        ({"ranks": 2}, "ranks is 2; .* give ranks=ranks_of_this_job"),
        ({"kept_mantissa_bits": 52}, "kept_mantissa_bits is 52; give a whole number from 0 to 51"),
        ({"kept_mantissa_bits": -1}, "kept_mantissa_bits is -1"),
        ({"kept_mantissa_bits": 2.0}, "kept_mantissa_bits is 2.0"),
        ({"threads": 1.5}, r"threads is 1\.5"),
        ({"reference": "disk"}, "reference is 'disk'"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_before_anything_is_made(
    folder: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        opened(folder, **options)

    assert not folder.exists()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"last": "3"}, "last is '3'"),
        ({"last": 2.0}, "last is 2.0"),
        ({"every_steps": 0.5}, "every_steps is 0.5"),
        ({"max_bytes": "much"}, "much"),
        ({"max_age_seconds": "1 h"}, "max_age_seconds is '1 h'"),
    ],
)
def test_what_to_keep_is_checked_when_it_is_said(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Keep(**fields)


def test_the_most_bytes_to_keep_may_be_given_as_text() -> None:
    assert Keep(max_bytes="50 GB") == Keep(max_bytes=50 * 10**9)  # type: ignore[arg-type]


def test_the_distance_of_baselines_may_be_found_by_the_store(folder: Path) -> None:
    """Of what stays as it is, a difference is always worth it, beyond the ten of the default."""
    state = {"table": np.arange(100_000)}
    with opened(folder, snap_dis="auto", keep=Keep(last=None), codec="balance") as store:
        references = [store.save(step, state).wait().reference_step for step in range(13)]

    assert references == [None, *range(12)]


# -- Small tensors that come and go ----------------------------------------------------------------------------


def with_extra(step: int, *extras: str) -> dict[str, Any]:
    """Return a state of 80 kB that drifts, and some single numbers, as a list of the best models has."""
    drift = np.random.default_rng(step).normal(0, 1e-4, 20_000).astype(np.float32)
    best = {name: np.float32([ord(name)]) for name in extras}
    return {"best": best, "weight": np.linspace(-1, 1, 20_000, dtype=np.float32) + drift, "twin": drift}


@pytest.mark.parametrize("scheme", ["progressive", "chain"])
@pytest.mark.parametrize("reference", ["memory", "stored"])
def test_a_small_tensor_that_comes_or_goes_starts_no_baseline(
    folder: Path, scheme: str, reference: str
) -> None:
    states = [
        with_extra(step, *extras) for step, extras in enumerate(["a", "ab", "b", "", "ac", "c", "a", "a"])
    ]
    with opened(folder, scheme=scheme, reference=reference, keep=Keep(last=None)) as store:
        saved = [store.save(step, state).wait() for step, state in enumerate(states)]
        whole = sorted(saved, key=lambda one: one.stored_bytes)[-1]

        assert [one.reference_step is None for one in saved] == [True, *[False] * 7]
        assert whole.step == 0
        assert not any(one.note for one in saved)
        for step, state in enumerate(states):
            assert same(store.restore(step).state, state)
            # What is sent to a worker that has another of them, or none.
            for other in (None, 0, 4, 6):
                worker = {"weight": np.zeros(20_000, np.float32), "twin": np.zeros(20_000, np.float32)}
                refresher = Refresher(worker)
                if other is not None:
                    refresher.apply(store.refresh(None, other))
                refresher.apply(store.refresh(other, step))
                assert same(worker, {name: state[name] for name in worker})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extra": np.ones(100)}, ", whole: extra is new"),
        ({"weight": np.ones(5)}, ", whole: weight has another shape, type or part"),
        ({"extra": np.ones(100), "more": np.ones(50)}, ", whole: extra is new and 1 more changed"),
    ],
)
def test_what_starts_a_baseline_is_told(folder: Path, change: dict[str, Any], told: str) -> None:
    lines: list[str] = []
    with opened(folder, report=lines.append) as store:
        store.save(1, training(1))
        store.save(2, training(2) | change).wait()
        store.save(3, training(3) | {"extra": np.ones(100)})

    assert lines[1].endswith(told)
    assert not lines[0].endswith("new")
