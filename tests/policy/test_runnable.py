"""What the loader runs of what can be simulated: the same answer for predictions and for the loader itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.policy.runnable import why_not_run
from penstock.simulate.policies import POLICY_NAMES


def machine(*tiers: StorageClass, ranks: int = 1) -> Machine:
    return Machine(SharedStore(Curve.flat(1e8)), (tier("staging"), *tiers), ranks)


def tier(name: str, path: str | None = None) -> StorageClass:
    return StorageClass(
        name, 10**9, 2, Curve.flat(1e9), backend="memory" if path is None else "filesystem", path=path
    )


def test_the_loader_keeps_what_one_rank_reads_most_in_its_own_memory() -> None:
    assert why_not_run(machine(), "frequency") is None
    assert why_not_run(machine(tier("ram")), "frequency") is None
    assert why_not_run(machine(ranks=8), "frequency") is None

    assert [name for name in POLICY_NAMES if why_not_run(machine(), name) is None] == ["frequency"]
    assert "other ranks" in str(why_not_run(machine(tier("ram"), ranks=8), "frequency"))


@pytest.mark.parametrize("disk", [tier("SSD"), tier("nvme"), tier("scratch", path="/scratch")])
def test_a_machine_with_a_disk_is_refused_by_the_loader_for_the_same_reason(
    disk: StorageClass, image_folder: Callable[..., Path]
) -> None:
    on = machine(tier("ram"), disk)

    reason = why_not_run(on, "frequency")

    assert reason is not None
    assert "in memory only" in reason
    with pytest.raises(ConfigError) as refusal:
        Loader(image_folder(), batch_size=2, epochs=1, transforms=[Resize(8), ToTensor()], machine=on)
    assert reason in str(refusal.value)
