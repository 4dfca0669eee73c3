"""What a store says, and when, where a user gave it what it cannot use or where something is not as it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import opened

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
