"""What a snapshot shall be: a difference to what was saved before it, where that can be relied on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint import AutoDistance, Keep, SnapshotStore
from penstock.checkpoint.files.catalog import Catalog
from penstock.checkpoint.recipe import RAW, EncodingConfig, SnapshotDecision, check_part, decide, new_baseline
from penstock.checkpoint.state.tensors import Layout
from penstock.checkpoint.tiers.local import LocalTier
from penstock.compiling import Part
from penstock.errors import ConfigError, FormatError
from penstock.policy.delta_schemes import Scheme, reference_of


def state(step: int, size: int = 10_000) -> dict[str, Any]:
    weights = np.random.default_rng(0).normal(size=size).astype(np.float32)
    weights[::9] *= np.float32(1 + 1e-3 * step)
    return {"weights": weights}


def saved(folder: Path, steps: list[int], **settings: Any) -> Catalog:
    arguments: dict[str, Any] = {"keep": Keep(last=None), "threads": 1, "report": None} | settings
    with SnapshotStore(folder, **arguments) as store:
        for step in steps:
            store.save(step, state(step)).wait()
    return looked_at(folder)


def looked_at(*folders: Path) -> Catalog:
    catalog = Catalog([LocalTier(folder) for folder in folders])
    catalog.look()
    return catalog


def layouts_of(catalog: Catalog, step: int = 1) -> list[Layout]:
    manifest = catalog.manifest(0, step)
    assert manifest is not None
    return [stored.layout for stored in manifest.tensors]


@pytest.mark.parametrize("scheme", ["progressive", "chain", "complete"])
@pytest.mark.parametrize("snap_dis", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_references_are_those_of_the_paper_also_over_restarts(
    folder: Path, scheme: Scheme, snap_dis: int
) -> None:
    """Each store saves two and is closed: the next goes on in the middle of a round."""
    for first in range(0, 10, 2):
        saved(folder, [first, first + 1], scheme=scheme, snap_dis=snap_dis)

    catalog = looked_at(folder)

    for step in range(10):
        manifest = catalog.manifest(0, step)
        assert manifest is not None
        expected = reference_of(scheme, step, snap_dis)
        assert (manifest.reference and manifest.reference.step) == expected, step


def test_a_snapshot_that_is_saved_before_the_codec_is_compiled_is_a_baseline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its blocks are stored, also those that did not change: it needs no other, and no other stays for it."""
    lines: list[str] = []
    with monkeypatch.context() as uncompiled:
        uncompiled.setattr(Part, "ask", lambda part: None)
        catalog = saved(folder, [1, 2, 3], keep=2, report=lines.append)

    assert catalog.steps() == [2, 3]
    assert [copy.manifest and copy.manifest.reference for copy in catalog.on_tier(0)] == [None, None]
    whole = "%), baseline: no block is stored as a difference"
    assert [line.endswith(whole) for line in lines] == [False, True, True]

    manifest = saved(folder, [4], keep=2).manifest(0, 4)
    assert manifest is not None
    assert manifest.reference is not None
    assert manifest.reference.step == 3


def test_a_reference_that_is_damaged_torn_or_gone_makes_a_baseline(folder: Path) -> None:
    catalog = saved(folder, [1, 2])
    way, layouts = EncodingConfig("progressive", 10, "balance"), layouts_of(catalog)
    decision = decide(catalog, 0, new_baseline(3, catalog), way, layouts)
    assert decision.reference is not None
    assert (decision.reference.step, [link[:2] for link in decision.chain]) == (2, [(0, 1), (0, 2)])

    catalog.mark_damaged(1)
    assert decide(catalog, 0, new_baseline(3, catalog), way, layouts).reference is None

    (folder / "step-000000000001" / "manifest.json").unlink()
    catalog = looked_at(folder)
    assert decide(catalog, 0, new_baseline(3, catalog), way, layouts).reference is None


def test_a_damaged_copy_of_a_reference_is_passed_over_for_a_good_one(folder: Path, tmp_path: Path) -> None:
    """Its part is torn on the fast tier, and whole on the slow one."""
    fast = tmp_path / "fast"
    with SnapshotStore(folder, fast=fast, threads=1, report=None) as store:
        store.save(1, state(1)).wait()
    (fast / "step-000000000001" / "manifest.json").write_bytes(b"{}")
    catalog = looked_at(fast, folder)
    manifest = catalog.manifest(1, 1)
    assert manifest is not None
    layouts = [stored.layout for stored in manifest.tensors]

    decision = decide(
        catalog, 1, new_baseline(2, catalog), EncodingConfig("progressive", 10, manifest.codec), layouts
    )

    assert [link[:2] for link in decision.chain] == [(1, 1)]


@pytest.mark.parametrize(
    ("way", "change"),
    [
        (EncodingConfig("progressive", 10, "speed"), "another codec"),
        (EncodingConfig("progressive", 10, RAW), "as it is"),
        (EncodingConfig("complete", 10, "balance"), "all are whole"),
        (EncodingConfig("progressive", 1, "balance"), "every one is a baseline"),
        (EncodingConfig("progressive", 2, "balance"), "the next round begins"),
    ],
)
def test_another_way_of_storing_starts_a_baseline(folder: Path, way: EncodingConfig, change: str) -> None:
    catalog = saved(folder, [1, 2])

    assert decide(catalog, 0, new_baseline(3, catalog), way, layouts_of(catalog)).reference is None, change


def test_other_tensors_start_a_baseline(folder: Path) -> None:
    catalog = saved(folder, [1])
    (layout,) = layouts_of(catalog)
    way = EncodingConfig("progressive", 10, "balance")

    for layouts in (
        [],
        [layout, Layout("more", layout.dtype, (30,))],
        [Layout("weights", layout.dtype, (100, 100))],
        [Layout("renamed", layout.dtype, layout.shape)],
    ):
        assert decide(catalog, 0, new_baseline(2, catalog), way, layouts).reference is None
    assert decide(catalog, 0, new_baseline(2, catalog), way, [layout]).reference is not None


def test_a_step_that_is_there_is_not_saved_again_and_the_clock_may_be_set_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = saved(folder, [5])
    manifest = catalog.manifest(0, 5)
    assert manifest is not None
    way = EncodingConfig("progressive", 10, "balance")

    with pytest.raises(ConfigError, match=r"there is a snapshot of step 5 in .* already"):
        decide(catalog, 0, new_baseline(5, catalog), way, [])

    monkeypatch.setattr("penstock.checkpoint.recipe.time.time", lambda: 1.0)
    decision = decide(catalog, 0, new_baseline(3, catalog), way, layouts_of(catalog, 5))
    assert decision.created_seconds > manifest.created_seconds
    assert decision.reference is not None
    assert decision.reference.step == 5


def test_what_was_saved_while_the_clock_was_ahead_does_not_stay_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what came after: its order is that of dates, so it was dated after."""
    now_seconds = 1.0e9
    monkeypatch.setattr("penstock.checkpoint.recipe.time.time", lambda: now_seconds)
    keep = Keep(last=None, max_age_seconds=3600.0)

    def save(step: int, seconds: float) -> list[int]:
        nonlocal now_seconds
        now_seconds = 1.0e9 + seconds
        return saved(folder, [step], keep=keep, scheme="complete").steps()

    assert save(1, 3.0e7) == [1]
    assert save(2, 3.0e7 + 60) == [1, 2]
    assert save(3, 0.0) == [1, 2, 3], "in the order of the saves, whatever the clock said"
    assert save(4, 1800.0) == [1, 2, 3, 4]
    assert save(5, 3600.0) == [1, 2, 3, 4, 5]
    assert save(6, 3601.0) == [4, 5, 6]


def test_a_plan_travels_to_other_ranks_as_json(folder: Path) -> None:
    import json

    catalog = saved(folder, [1, 2])
    for layouts in (layouts_of(catalog), []):
        decision = decide(
            catalog, 0, new_baseline(3, catalog), EncodingConfig("progressive", 10, "balance"), layouts
        )
        assert SnapshotDecision.read(json.loads(json.dumps(decision))) == decision


def test_an_automatic_distance_makes_a_baseline_when_differences_no_longer_pay(folder: Path) -> None:
    """Every step changes all bits of all weights: a difference is as large as a whole."""
    generator = np.random.default_rng(1)
    with SnapshotStore(
        folder, snap_dis=AutoDistance(), keep=Keep(last=None), threads=1, report=None
    ) as store:
        for step in range(12):
            weights = generator.integers(0, 2**32, 10_000, np.uint32).view(np.float32)
            store.save(step, {"weights": weights}).wait()
        random = [one.reference_step for one in store.list()]
    with SnapshotStore(
        folder.parent / "steady", snap_dis=AutoDistance(), keep=Keep(last=None), threads=1, report=None
    ) as store:
        for step in range(12):
            store.save(step, {"weights": np.arange(10_000.0)}).wait()
        steady = [one.reference_step for one in store.list()]

    assert random.count(None) > steady.count(None)


def test_a_part_is_read_back_to_its_end_where_that_is_wanted(folder: Path) -> None:
    catalog = saved(folder, [1])
    manifest = catalog.manifest(0, 1)
    assert manifest is not None
    decision = SnapshotDecision(1, manifest.uid, manifest.created_seconds, manifest.clock_seconds, (), None)
    (part,) = manifest.parts
    path = folder / "step-000000000001" / part.file
    check_part(catalog.tiers[0], decision, 0, part, to_its_end=True)

    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)

    check_part(catalog.tiers[0], decision, 0, part, to_its_end=False)
    with pytest.raises(FormatError, match=r"part-00000\.pst is damaged: block 0"):
        check_part(catalog.tiers[0], decision, 0, part, to_its_end=True)
