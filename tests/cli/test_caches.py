"""`penstock simulate caches` as a user types it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.typed import run_command

from penstock.cli import caches, sharing
from penstock.errors import ConfigError, DataError, FormatError
from penstock.simulate.caches import hit_ratios
from penstock.trace.references import References, write_references

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
    data = run_json(capsys, "--samples", "1000", "--policies", "lru,min", "--order", "full")

    assert data["job"] == {
        "samples": 1000,
        "epochs": 5,
        "ranks": 1,
        "own_subsets": False,
        "batch_size": 64,
        "seed": 0,
    }
    assert data["cache_samples"] == list(range(10, 1001, 10))
    assert data["bound_hit_ratio"][49] == 0.4
    lru, best = data["curves"]
    assert (lru["order"], lru["policy"], best["policy"]) == ("full", "lru", "min")
    assert len(lru["hit_ratio"]) == len(lru["expected_hit_ratio"]) == len(best["hit_ratio"]) == 100
    assert best["expected_hit_ratio"] is None
    assert lru["hit_ratio"][49] == pytest.approx(0.1227, abs=0.02)


def test_the_seed_changes_the_strings_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--samples", "500", "--sizes", "50%", "--policies", "lru", "--order", "full")

    first, again, other = (
        run_json(capsys, *words, "--seed", seed)["curves"][0]["hit_ratio"] for seed in ("0", "0", "1")
    )

    assert first == again != other


def test_many_ranks_are_averaged_and_their_spread_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--samples", "4000", "--ranks", "4", "--sizes", "50%", "--policies", "lru", "--order", "bundle")

    own = run_json(capsys, *words, "--subsets")["curves"][0]
    run(*words)

    assert own["hit_ratio"][0] == pytest.approx(0.4, abs=0.01)
    assert own["lowest_rank_hit_ratio"][0] <= own["hit_ratio"][0] <= own["highest_rank_hit_ratio"][0]
    out = capsys.readouterr().out
    assert "4 ranks sharing one order, 256 a batch" in out
    assert "bounded by MIN" in out


def test_a_trace_is_replayed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    string = np.random.default_rng(0).integers(0, 40, 500)
    write_references(tmp_path / "a.oracleGeneral", References.of(string, sizes_bytes=np.full(500, 7)))
    file = str(tmp_path / "a.oracleGeneral")

    data = run_json(capsys, "--trace", file, "--sizes", "10,20", "--plot", str(tmp_path / "a.png"))
    in_bytes = run_json(capsys, "--trace", file, "--sizes", "70 B,140 B", "--bytes")
    run("--trace", file)

    assert data["trace"] == {"file": file, "requests": 500, "objects": 40, "objects_bytes": 280}
    assert data["cache_objects"] == [10, 20]
    by_policy = {curve["policy"]: curve["hit_ratio"] for curve in data["curves"]}
    assert list(by_policy) == ["lru", "lfu", "mru", "clock", "fifo", "min"]
    for policy, ratios in by_policy.items():
        assert ratios == hit_ratios(string, [10, 20], policy).tolist()
    assert in_bytes["cache_bytes"] == [70, 140]
    assert [curve["hit_ratio"] for curve in in_bytes["curves"]] == [by_policy["lru"], by_policy["fifo"]]
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "500 requests for 40 objects; 8.0% are an object's first" in capsys.readouterr().out


def test_figures_5_and_10_stand_beside_the_papers_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Relative sizes decide, so that data sets of some thousand samples show what the paper's do."""
    monkeypatch.setattr("penstock.simulate.cache_study.FOOD101_SAMPLES", 3000)
    monkeypatch.setattr("penstock.simulate.cache_study.IMAGENET100_SAMPLES", 2000)

    five = run_json(capsys, "--figure", "5", "--plot", str(tmp_path / "5.png"))
    ten = run_json(capsys, "--figure", "10")
    run("--figure", "10")

    assert [panel["name"] for panel in five["panels"]] == ["ImageNet100, LRU", "Food101, LRU"]
    assert five["panels"][0]["paper_improvement"] == {"mean": 0.407, "most": 0.741}
    assert len(five["panels"][0]["cache_share"]) == 101
    lru, lfu, mru = (panel["improvement"] for panel in ten["panels"])
    # 1 - f / b with f = c + (1 - c) ln(1 - c) and b = c, over c = 0.1, 0.2, ... 1.
    cache = np.arange(1, 10) / 10
    expected = np.append(-(1 - cache) * np.log(1 - cache) / cache, 0.0).mean()
    assert lru["of_new_hits"][0] == pytest.approx(expected, abs=0.01)
    assert lfu["of_new_hits"][0] < lru["of_new_hits"][0]
    assert mru["of_new_hits"][0] == pytest.approx(0.0, abs=0.001)
    out = capsys.readouterr().out
    assert "33.8 (59.6) %" in out
    assert "29.3 (66.6) %" in out
    assert (tmp_path / "5.png").exists()


def test_small_caches_are_shown_for_subsets_and_for_a_shared_order(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: dict[str, Any] = {}
    replay = caches._curves

    def once(*of: Any) -> Any:
        return replayed[repr(of)] if repr(of) in replayed else replayed.setdefault(repr(of), replay(*of))

    monkeypatch.setattr(caches, "_curves", once)
    data = run_json(capsys, "--small", "--samples", "6400", "--plot", str(tmp_path / "small.png"))
    run("--small", "--samples", "6400")

    of_name = {panel["name"]: panel for panel in data["panels"]}
    assert len(of_name) == 8
    own = {
        curve["order"]: curve
        for curve in of_name["4 ranks, own subsets"]["curves"]
        if curve["policy"] == "lru"
    }
    assert own["bundle:0.01"]["hit_ratio"][4] > 3 * own["bundle"]["hit_ratio"][4]
    shared = of_name["4 ranks, one shared order"]
    best = next(curve for curve in shared["curves"] if curve["policy"] == "min")
    assert best["hit_ratio"][4] > 0.9 * shared["bound_hit_ratio"][4]
    out = capsys.readouterr().out
    assert "LRU, one shared order" in out
    assert (
        "\n  penstock simulate sharing --small --samples 6400 --ranks 16 --epochs 5 --batch 64 --seed 0\n"
        in out
    )
    few, many = (
        (curve["hit_ratio"], of_name[f"{ranks} ranks, one shared order"]["bound_hit_ratio"])
        for ranks in (4, 16)
        for curve in of_name[f"{ranks} ranks, one shared order"]["curves"]
        if curve["policy"] == "min"
    )
    reached = {min(hit / bound for hit, bound in zip(*each, strict=True) if bound) for each in (few, many)}
    # 16 ranks for 5 epochs: a rank reads so few samples twice that its own MIN stays below the bound.
    assert min(reached) < 0.8 < 0.9 < max(reached)
    assert f"MIN by itself reaches {100 * min(reached):.1f} % at the least (16 ranks, 10 %)" in out


def test_one_epoch_brings_nothing_back(capsys: pytest.CaptureFixture[str]) -> None:
    run("--small", "--samples", "800", "--epochs", "1", "--order", "full")

    assert "With one epoch nothing comes back" in capsys.readouterr().out


def test_ranks_that_share_an_order_are_told_of_caches_that_they_agree_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("--samples", "400", "--ranks", "4", "--epochs", "3", "--batch-size", "40", "--sizes", "1%,10%,50%")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "simulate sharing" in line)
    run("--samples", "400", "--ranks", "4", "--sizes", "10%", "--subsets")
    run("--samples", "400", "--ranks", "4", "--sizes", "10%", "--order", "bundle")
    run("--samples", "400", "--sizes", "10%")

    assert line == (
        "  penstock simulate sharing --samples 400 --ranks 4 --epochs 3 --batch 10 --seed 0 --cache 0.01 0.1 0.5"
    )
    assert "simulate sharing" not in capsys.readouterr().out


def test_the_command_for_agreed_caches_counts_the_same_job(capsys: pytest.CaptureFixture[str]) -> None:
    """Of its MIN per rank, which need not keep what a step brings in, this command's is a little less."""
    words = ("--samples", "400", "--ranks", "4", "--epochs", "3", "--batch-size", "40", "--sizes", "10%,50%")
    data = run_json(capsys, *words, "--policies", "min", "--order", "full")
    run(*words)
    command = next(line for line in capsys.readouterr().out.splitlines() if "simulate sharing" in line)
    run_command(sharing, *command.split()[2:], "--json")

    points = json.loads(capsys.readouterr().out)["points"]
    (curve,) = data["curves"]
    assert [point["samples_held"] for point in points] == [4 * size for size in data["cache_samples"]]
    for point, hit_ratio, bound in zip(points, curve["hit_ratio"], data["bound_hit_ratio"], strict=True):
        assert hit_ratio <= point["schemes"]["MIN per rank"]["local_share"] < hit_ratio + 0.02
        assert point["least_store_reads_share"] == pytest.approx(1 - bound)


@pytest.mark.parametrize("size", ["1e30%", "4000000000000000000"])
def test_a_huge_cache_holds_everything(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "--samples", "50", "--sizes", size, "--epochs", "2", "--order", "full")

    assert data["bound_hit_ratio"] == [0.5]
    assert {tuple(curve["hit_ratio"]) for curve in data["curves"]} == {(0.5,)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policies lru,arc", "no eviction policy 'arc'; known are lru, lfu"),
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
        ("--trace a.csv --samples 5", "--trace and --samples do not go together"),
        ("--trace a.csv --figure 5", "--trace and --figure do not go together"),
        ("--figure 5 --sizes 3%", "--figure and --sizes do not go together"),
        ("--small --ranks 3", "--small and --ranks do not go together"),
        ("--bytes", "--bytes is about a trace"),
        ("--format csv", "--format is about a trace"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words.split())


def test_a_bad_trace_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2,3\n4,5\n")
    (tmp_path / "empty.csv").write_text("time,id,size\n")

    with pytest.raises(FormatError, match=r"a\.csv, line 2"):
        run("--trace", str(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match="has no requests"):
        run("--trace", str(tmp_path / "empty.csv"))
    with pytest.raises(DataError, match="cannot be read"):
        run("--trace", str(tmp_path / "none.csv"))
    (tmp_path / "a.csv").write_text("1,2,3\n")
    with pytest.raises(ConfigError, match="mru is replayed over equal objects only"):
        run("--trace", str(tmp_path / "a.csv"), "--bytes", "--policies", "mru")


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "1\n\n2\nxx\n"), ("a.csv", "id,size\n1,5\n2,5\nxx,5\n")]
)
def test_ids_that_are_text_are_said_with_the_first_such_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    run("--trace", str(tmp_path / name), "--policies", "lru", "--sizes", "50%")
    assert "Ids are text, numbered by first appearance: line 4 has 'xx'" in capsys.readouterr().out

    (tmp_path / name).write_text(text.replace("xx", "3"))
    run("--trace", str(tmp_path / name), "--policies", "lru", "--sizes", "50%")
    assert "Ids are text" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--samples", "1000000000000"), "--samples is 1,000,000,000,000, which takes at least 80 TB"),
        (("--small", "--samples", "1000000000000"), "which takes at least 40 TB"),
        (("--policies", "LRU"), "did you mean lru"),
        (("--policies", ""), "give at least one name"),
    ],
)
def test_what_cannot_be_replayed_is_told_with_the_next_move(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(*words)
