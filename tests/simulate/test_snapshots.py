"""Snapshots under the seven methods: the paper's figures, and the sizes of two models that were really trained."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError, FormatError
from penstock.machine.ssd import Drive, Ssd
from penstock.simulate.snapshots import (
    METHODS,
    OWN_METHOD,
    SnapshotSizes,
    compare_methods,
    method_named,
    read_sizes,
    recorded_sizes,
    snapshot_stream,
)
from penstock.simulate.wear import DeleteFile, ReadFile, WriteFile, run_stream, warm_drive

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "ssd-wear.md"
RECORDER = Path(__file__).parents[2] / "benchmarks" / "snapshots" / "record_sizes.py"


def test_seven_methods_at_three_distances_run_on_two_trained_models() -> None:
    """On an eighth of the paper's drive, with an eighth of CaffeNet."""
    drive = warm_drive(replace(Ssd.paper(), blocks_per_chip=2_048))
    models = [model.scaled(57_286_118 // 8) for model in recorded_sizes()]

    runs = compare_methods(drive, models)

    assert len(runs) == 2 * 3 * 7
    shares: dict[tuple[str, int, str], float] = {}
    for run in runs:
        assert run.result is not None
        assert run.stored_bytes is not None
        complete = 4 * run.sizes.parameters * run.sizes.count
        shares[run.sizes.name, run.snap_dis, run.method.name] = run.stored_bytes / complete
        # Sequential files make one erase for each block that they fill, on a drive at its threshold.
        assert run.result.work.erases == pytest.approx(run.stored_bytes / 4_096 / 63, rel=0.01)
        assert run.result.work.moved_pages == 0
    for (model, distance, method), share in shares.items():
        if method == "dynrle-progressive":  # the paper: smallest of all, and smaller the rarer baselines are
            assert share == min(shares[model, distance, other.name] for other in METHODS)
            assert share <= min(shares[model, nearer, method] for nearer in (3, 5, 10) if nearer <= distance)
            assert share < shares[model, distance, "dynrle-chain"]


# -- Which files a scheme reads, writes and deletes ------------------------------------------------------

SMALL = SnapshotSizes(
    "small",
    "",
    25,
    {"complete": (100,) * 6, "gzip": (90,) * 6, "huffman": (80, 81, 82, 83, 84, None)},
    {
        "gzip": {(later, later - 1): 60 + later for later in range(1, 6)},
        "rle4": {},
        "rle4_gzip": {},
        "dynrle": {(1, 0): 51, (2, 0): 52, (2, 1): 50, (4, 3): 54, (5, 3): 55, (5, 4): 53},
    },
)


def said(method: str, snap_dis: int) -> list[list[str]]:
    lines: list[list[str]] = []
    for operation in snapshot_stream(SMALL, method_named(method), snap_dis, with_restores=True).operations:
        match operation:
            case WriteFile(name, size):
                lines[-1].append(f"write {name[-1]}: {size}")
            case ReadFile(name):
                lines[-1].append(f"read {name[-1]}")
            case DeleteFile(name):
                lines[-1].append(f"delete {name[-1]}")
            case _:
                lines.append([])
    return lines


def test_progressive_deltas_are_kept_until_the_next_baseline_is_written() -> None:
    assert said("dynrle-progressive", 3) == [
        ["write 1: 80"],
        ["read 1"],
        ["read 1", "write 2: 51"],
        ["read 1", "read 2"],
        ["read 1", "read 2", "write 3: 50"],
        ["read 1", "read 2", "read 3"],
        ["write 4: 83", "delete 1", "delete 2", "delete 3"],
        ["read 4"],
        ["read 4", "write 5: 54"],
        ["read 4", "read 5"],
        ["read 4", "read 5", "write 6: 53"],
        ["read 4", "read 5", "read 6"],
    ]


def test_a_chain_keeps_its_baseline_and_its_newest_delta() -> None:
    assert said("dynrle-chain", 3)[::2] == [
        ["write 1: 80"],
        ["read 1", "write 2: 51"],
        ["read 1", "write 3: 52", "delete 2"],
        ["write 4: 83", "delete 1", "delete 3"],
        ["read 4", "write 5: 54"],
        ["read 4", "write 6: 55", "delete 5"],
    ]
    assert said("dynrle-chain", 3)[-1] == ["read 4", "read 6"]


def test_complete_snapshots_replace_each_other() -> None:
    assert said("gzip", 3)[:4] == [["write 1: 90"], ["read 1"], ["write 2: 90", "delete 1"], ["read 2"]]


def test_gzip_on_deltas_takes_the_baselines_too() -> None:
    assert SMALL.stored_bytes(method_named("gzip-delta"), 4) == [90, 61, 62, 63, 90, 65]


def test_sizes_that_were_not_recorded_are_said_to_be_missing() -> None:
    drive = Drive(Ssd.paper())
    (run,) = compare_methods(drive, [SMALL], [method_named("rle4")], [3])

    assert run.stored_bytes is None
    assert run.result is None
    with pytest.raises(ConfigError, match="small has no sizes recorded for rle4 at snap_dis 3"):
        snapshot_stream(SMALL, method_named("rle4"), 3)
    assert SMALL.stored_bytes(method_named("dynrle-chain"), 1) is None  # the sixth baseline is a gap
    with pytest.raises(ConfigError, match="snap_dis is 0"):
        SMALL.stored_bytes(METHODS[0], 0)


def test_a_larger_model_has_every_size_in_proportion() -> None:
    scaled = SMALL.scaled(50)

    assert scaled.baselines["huffman"] == (160, 162, 164, 166, 168, None)
    assert scaled.deltas["dynrle"][2, 1] == 100
    assert SMALL.scaled(26).baselines["complete"][0] == 104
    assert SMALL.scaled(12).baselines["gzip"][0] == 44  # 43.2, rounded up
    with pytest.raises(ConfigError, match="parameters is 0"):
        SMALL.scaled(0)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="'zip' is no encoding; the known ones are complete, gzip, gzip-delta"
    ):
        method_named("zip")


# -- Recorded sizes --------------------------------------------------------------------------------------


def test_penstocks_own_codec_is_recorded_beside_the_seven() -> None:
    """And writes less than the best of them."""
    own, best = method_named("penstock"), method_named("dynrle-progressive")
    assert own not in METHODS
    for model in recorded_sizes():
        for snap_dis in (3, 5, 10):
            ours, theirs = (model.stored_bytes(method, snap_dis) for method in (own, best))
            assert ours is not None
            assert theirs is not None
            assert sum(ours) < 0.93 * sum(theirs)


GOOD: dict[str, Any] = {
    "format": "penstock snapshot sizes 1",
    "models": [
        {
            "name": "a",
            "parameters": 5,
            "complete_bytes": [20, 20],
            "gzip_bytes": [19, None],
            "deltas": [{"snapshot": 1, "reference": 0, "dynrle_bytes": 11}],
        }
    ],
}


def test_sizes_are_read_with_their_gaps() -> None:
    (model,) = read_sizes(json.dumps(GOOD), "sizes.json")

    unknown = (None, None)
    assert model.baselines == {
        "complete": (20, 20),
        "gzip": (19, None),
        "huffman": unknown,
        "penstock": unknown,
    }
    assert model.deltas["dynrle"] == {(1, 0): 11}
    assert model.deltas["gzip"] == {}


@for_each(
    ("spoil", "message"),
    [
        (lambda data: data.update(format="other"), "its format is 'other'"),
        (lambda data: data.update(models=[]), r"models is \[\]; it must be a list"),
        (lambda data: data.update(models=[3]), r"models\[0\] is 3; it must be an object"),
        (lambda data: data["models"][0].pop("name"), r"models\[0\]\.name is None"),
        (lambda data: data["models"][0].update(parameters=0), r"models\[0\]\.parameters is 0"),
        (
            lambda data: data["models"][0].update(complete_bytes=[]),
            r"complete_bytes is \[\]; .* at least one",
        ),
        (lambda data: data["models"][0].update(complete_bytes=[20, None]), "complete_bytes has a gap"),
        (lambda data: data["models"][0].update(gzip_bytes=[19]), r"gzip_bytes is \[19\]; .* 2 sizes"),
        (lambda data: data["models"][0].update(gzip_bytes=[19, 1.5]), r"gzip_bytes\[1\] is 1.5"),
        (lambda data: data["models"][0].update(deltas=5), "deltas is 5; it must be a list"),
        (lambda data: data["models"][0].update(deltas=[5]), r"deltas\[0\] is 5; it must be an object"),
        (
            lambda data: data["models"][0]["deltas"][0].update(snapshot=2),
            r"deltas\[0\] is of snapshot 2 to 0",
        ),
        (lambda data: data["models"][0]["deltas"][0].update(reference=-1), r"deltas\[0\]\.reference is -1"),
        (
            lambda data: data["models"][0]["deltas"][0].update(dynrle_bytes=0),
            r"deltas\[0\]\.dynrle_bytes is 0",
        ),
    ],
)
def test_wrong_sizes_are_named_by_their_place(spoil: Callable[[Any], object], message: str) -> None:
    data = json.loads(json.dumps(GOOD))
    spoil(data)

    with pytest.raises(FormatError, match=r"sizes\.json: ") as caught:
        read_sizes(json.dumps(data), "sizes.json")

    assert caught.match(message)


def test_what_is_no_json_is_named_by_its_line() -> None:
    with pytest.raises(FormatError, match=r"sizes\.json, line 2: it is not JSON"):
        read_sizes("{\n nothing", "sizes.json")
    with pytest.raises(FormatError, match="its format is 'list'"):
        read_sizes("[]", "sizes.json")


def test_the_sizes_in_the_documentation_can_be_read() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)

    (model,) = read_sizes(example, "the example")

    assert model.stored_bytes(method_named("dynrle-progressive"), 3) == [
        415_000_000,
        352_000_000,
        341_000_000,
    ]
    assert model.stored_bytes(method_named("gzip-delta"), 3) is None


# -- How the recorded sizes were made --------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorder() -> dict[str, Any]:
    return runpy.run_path(str(RECORDER))


def test_the_recorder_writes_what_is_read_again(recorder: dict[str, Any]) -> None:
    """Of four snapshots: all sizes that any scheme at any distance asks for."""
    random = np.random.default_rng(0)
    snapshots = [
        (np.float32(0.05) * random.standard_normal(3_000, np.float32)).view(np.uint32) for _ in range(4)
    ]

    model = recorder["sizes_of"](snapshots) | {"name": "a"}
    (read,) = read_sizes(json.dumps({"format": "penstock snapshot sizes 1", "models": [model]}), "sizes")

    assert read.parameters == 3_000
    assert read.baselines["complete"] == (12_000,) * 4
    for method in (*METHODS, OWN_METHOD):
        for snap_dis in range(1, 6):
            stored = read.stored_bytes(method, snap_dis)
            assert stored is not None
            assert all(0 < size <= 12_000 for size in stored)
    assert all(delta["heading_bits"] in range(6) for delta in model["deltas"])


@pytest.mark.slow
def test_the_recorder_runs_and_its_file_can_be_read(tmp_path: Path, recorder: dict[str, Any]) -> None:
    recorder["main"](["--quick", "--out", str(tmp_path / "sizes.json")])

    models = read_sizes((tmp_path / "sizes.json").read_text(), "sizes.json")
    assert [model.name for model in models] == [model.name for model in recorded_sizes()]
    assert all(model.stored_bytes(method, 3) for model in models for method in METHODS)
    assert run_stream(Drive(Ssd.paper()), snapshot_stream(models[0], METHODS[3], 3)).work.written_pages > 0
