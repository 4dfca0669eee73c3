"""`penstock simulate caches` as a user types it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.typed import run_command
from tests.for_each import for_each

from penstock.cli import caches
from penstock.errors import ConfigError, DataError, FormatError
from penstock.recordings.references import References, write_references
from penstock.simulate.caches import hit_shares

pytestmark = pytest.mark.usefixtures("fonts")

run = partial(run_command, caches, "caches")


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    run(*words, "--json")
    return json.loads(capsys.readouterr().out)


def test_a_training_is_shown_by_order_policy_and_size_beside_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("--samples", "1000", "--sizes", "10%,50%,100%")

    out = capsys.readouterr().out
    assert "full shuffle" in out
    assert "bundles of 10 %" in out
    (header,) = {" ".join(line.split()) for line in out.splitlines() if "bound" in line}
    assert header == "cache samples LRU LFU MRU CLOCK FIFO MIN LRU by formula bound"
    row = next(
        line.split() for line in out.split("bundles of 10 %")[1].splitlines() if line.split()[:1] == ["50"]
    )
    assert row[:4] == ["50", "%", "500", "40.00"]
    assert row[-1] == "40.00"
    assert "1,000 samples, 5 epochs, one rank, seed 0" in out


def test_json_has_every_curve_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "--samples", "1000", "--evictions", "lru,min", "--order", "full")

    assert data["job"] == {
        "samples": 1000,
        "epochs": 5,
        "ranks": 1,
        "own_subsets": False,
        "batch_size": 64,
        "seed": 0,
    }
    assert data["cache_samples"] == list(range(10, 1001, 10))
    assert data["bound_hit_share"][49] == 0.4
    lru, best = data["results"]
    assert (lru["order"], lru["eviction"], best["eviction"]) == ("full", "lru", "min")
    assert len(lru["hit_share"]) == len(lru["expected_hit_share"]) == len(best["hit_share"]) == 100
    assert best["expected_hit_share"] is None
    assert lru["hit_share"][49] == pytest.approx(0.1227, abs=0.02)


def test_the_seed_changes_the_strings_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--samples", "500", "--sizes", "50%", "--evictions", "lru", "--order", "full")

    first, again, other = (
        run_json(capsys, *words, "--seed", seed)["results"][0]["hit_share"] for seed in ("0", "0", "1")
    )

    assert first == again != other


def test_many_ranks_are_averaged_and_their_spread_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--samples", "4000", "--ranks", "4", "--sizes", "50%", "--evictions", "lru", "--order", "bundle")

    own = run_json(capsys, *words, "--subsets")["results"][0]
    run(*words)

    assert own["hit_share"][0] == pytest.approx(0.4, abs=0.01)
    assert own["lowest_rank_hit_share"][0] <= own["hit_share"][0] <= own["highest_rank_hit_share"][0]
    out = capsys.readouterr().out
    assert "4 ranks sharing one order, 256 a batch" in out
    assert "bounded by MIN" in out


def test_a_trace_is_replayed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    string = np.random.default_rng(0).integers(0, 40, 500)
    write_references(tmp_path / "a.oracleGeneral", References.of(string, sizes_bytes=np.full(500, 7)))
    file = str(tmp_path / "a.oracleGeneral")

    data = run_json(capsys, "--recording", file, "--sizes", "10,20", "--plot", str(tmp_path / "a.png"))
    in_bytes = run_json(capsys, "--recording", file, "--sizes", "70 B,140 B", "--bytes")
    run("--recording", file)

    assert data["recording"] == {"file": file, "requests": 500, "objects": 40, "objects_bytes": 280}
    assert data["cache_objects"] == [10, 20]
    by_policy = {curve["eviction"]: curve["hit_share"] for curve in data["results"]}
    assert list(by_policy) == ["lru", "lfu", "mru", "clock", "fifo", "min"]
    for policy, ratios in by_policy.items():
        assert ratios == hit_shares(string, [10, 20], policy).tolist()
    assert in_bytes["cache_bytes"] == [70, 140]
    assert [curve["hit_share"] for curve in in_bytes["results"]] == [by_policy["lru"], by_policy["fifo"]]
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "500 requests for 40 objects; 8.0% are an object's first" in capsys.readouterr().out


def test_ranks_that_share_an_order_are_told_of_caches_that_they_agree_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("--samples", "400", "--ranks", "4", "--epochs", "3", "--batch-size", "40", "--sizes", "1%,10%,50%")
    told = capsys.readouterr().out
    run("--samples", "400", "--ranks", "4", "--sizes", "10%", "--subsets")
    run("--samples", "400", "--ranks", "4", "--sizes", "10%", "--order", "bundle")
    run("--samples", "400", "--sizes", "10%")

    assert "penstock simulate loading SCENARIO --policies hash-home,cover,cover+local,push" in told
    assert "simulate loading" not in capsys.readouterr().out


@pytest.mark.parametrize("size", ["1e30%", "4000000000000000000"])
def test_a_huge_cache_holds_everything(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "--samples", "50", "--sizes", size, "--epochs", "2", "--order", "full")

    assert data["bound_hit_share"] == [0.5]
    assert {tuple(curve["hit_share"]) for curve in data["results"]} == {(0.5,)}


@for_each(
    ("words", "message"),
    [
        ("--evictions lru,arc", "no eviction policy 'arc'; known are lru, lfu"),
        ("--order full,random", "no order 'random'"),
        ("--sizes 0.5", "--sizes has '0.5'; sizes are like"),
        ("--sizes 50..10%", "--sizes has"),
        ("--sizes 99999999999999999999", "--sizes has '99999999999999999999', larger than any cache"),
        (f"--sizes {'9' * 5000}", "larger than any cache"),
        ("--sizes=-5%", "--sizes: '-5%' cannot be: it must be zero or more"),
        ("--samples 0", "samples is 0"),
        ("--epochs 0", "epochs is 0"),
        ("--ranks 0", "ranks is 0"),
        ("--seed -1", "seed is -1"),
        ("--batch-size 0", "batch_size is 0"),
        ("--ranks 4 --samples 3", "ranks is 4; of 3 samples"),
        ("--recording a.csv --samples 5", "--recording and --samples do not go together"),
        ("--bytes", "--bytes is about a recording"),
        ("--format csv", "--format is about a recording"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words.split())


def test_a_bad_trace_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n4,5\n")
    (tmp_path / "empty.csv").write_text("time,id,size\n")

    with pytest.raises(FormatError, match=r"a\.csv, line 2"):
        run("--recording", str(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match="has no requests"):
        run("--recording", str(tmp_path / "empty.csv"))
    with pytest.raises(DataError, match="cannot be read"):
        run("--recording", str(tmp_path / "none.csv"))
    (tmp_path / "a.csv").write_text("1,2,3\n")
    with pytest.raises(ConfigError, match="mru is replayed over equal objects only"):
        run("--recording", str(tmp_path / "a.csv"), "--bytes", "--evictions", "mru")


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "1\n\n2\nxx\n"), ("a.csv", "id,size\n1,5\n2,5\nxx,5\n")]
)
def test_ids_that_are_text_are_said_with_the_first_such_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    run("--recording", str(tmp_path / name), "--evictions", "lru", "--sizes", "50%")
    assert "Ids are text, numbered by first appearance: line 4 has 'xx'" in capsys.readouterr().out

    (tmp_path / name).write_text(text.replace("xx", "3"))
    run("--recording", str(tmp_path / name), "--evictions", "lru", "--sizes", "50%")
    assert "Ids are text" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--samples", "1000000000000"), "--samples is 1,000,000,000,000, which takes at least 80 TB"),
        (("--evictions", "LRU"), "did you mean lru"),
        (("--evictions", ""), "give at least one name"),
    ],
)
def test_what_cannot_be_replayed_is_told_with_the_next_move(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(*words)
