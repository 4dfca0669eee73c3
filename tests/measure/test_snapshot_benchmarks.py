"""The benchmarks of snapshots go on running; the figures of their quick runs mean nothing."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "snapshots"


pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture
def benchmark_named(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return what imports a benchmark, which then finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)  # trainings set those of the whole process


@pytest.fixture(scope="module")
def resource_tracker_runs() -> None:
    """Start what Python keeps for as long as the process lives once it has started another, and the pipe to it."""
    resource_tracker.ensure_running()


def test_a_sequence_has_early_middle_and_late_snapshots_of_weights_and_optimizer_that_repeat_bit_for_bit(
    benchmark_named: Callable[[str], Any], tmp_path: Path
) -> None:
    sequences = benchmark_named("sequences")

    for folder in ("once", "again"):
        sequences.main(["--quick", "--folder", str(tmp_path / folder), "--only", "gpt-bf16"])

    once, again = (sequences.read_sequences(tmp_path / folder) for folder in ("once", "again"))
    assert [sequence.name for sequence in once] == ["gpt-bf16"]
    for first, second in zip(once, again, strict=True):
        assert [snapshot.group for snapshot in first.snapshots] == ["early"] * 2 + ["middle"] * 2 + [
            "late"
        ] * 2
        moved = [first.group(group)[1].moved for group in sequences.GROUPS]
        assert moved == sorted(moved, reverse=True)
        assert moved[-1] > 0
        for snapshot in first.snapshots:
            state = first.load(snapshot)
            assert {name.rpartition("/")[2] for name in state if name.startswith("optimizer/")} == {
                "exp_avg",
                "exp_avg_sq",
                "step",
            }
            repeated = second.load(snapshot)
            assert all(torch.equal(tensor, repeated[name]) for name, tensor in state.items())


@pytest.mark.parametrize("bits", [16, 32])
def test_the_peers_loops_take_differences_and_planes_of_words_as_plain_integers_would(
    benchmark_named: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """As they are written: what is compiled is tested where seconds do not count."""
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    with np.errstate(over="ignore"):  # words go round, as the compiled ones do without a word
        check_loops(benchmark_named("peer_codecs").loops_for.__wrapped__(bits), bits)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_the_peers_compiled_loops_do_the_same(benchmark_named: Callable[[str], Any], bits: int) -> None:
    check_loops(benchmark_named("peer_codecs").loops_for(bits), bits)


def check_loops(loops: Any, bits: int) -> None:
    generator = np.random.default_rng(1)
    word = np.dtype(f"uint{bits}")
    values, reference = generator.integers(0, 2**bits, (2, 1000), dtype=word)
    difference, zigzag, back = (np.empty_like(values) for _ in range(3))
    planes = np.empty((bits // 8, values.size), np.uint8)

    loops.difference(values, reference, difference)
    loops.zigzag_difference(values, reference, zigzag)
    loops.split(values, planes)

    for index in range(values.size):
        new, old = (ordered(int(of[index]), bits) for of in (values, reference))
        changed = (new - old + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        assert int(difference[index]) == changed % 2**bits
        assert int(zigzag[index]) == (2 * changed if changed >= 0 else -2 * changed - 1)
    assert np.array_equal(planes.T.copy().view(word).ravel(), values)
    loops.total(difference, reference, back)
    assert np.array_equal(back, values)
    loops.zigzag_total(zigzag, reference, back)
    assert np.array_equal(back, values)
    loops.join(planes, back)
    assert np.array_equal(back, values)


def ordered(bits_of_float: int, bits: int) -> int:
    """Return the integer that sorts as the float does: sign and magnitude, from the lowest up."""
    zero = 1 << (bits - 1)
    magnitude = bits_of_float % zero
    return zero + magnitude if bits_of_float == magnitude else zero - magnitude - 1


@pytest.mark.slow
def test_the_benchmark_of_codecs_checks_times_and_judges(
    benchmark_named: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark_named("compare_codecs").main(
        ["--quick", "--only", "cnn-sgd", "--peers", str(tmp_path), "--plot", str(tmp_path / "shares.svg")]
    )

    printed = capsys.readouterr().out
    assert printed.count("MB of float32\n") == 3
    assert printed.count("whole states of") == 3
    assert len(re.findall(r" 0 of \d+$", printed, re.MULTILINE)) == 3, (
        "no block is larger as a difference than alone"
    )
    assert printed.count("the paper's methods on 2 snapshots") == 3
    targets = printed.partition("\nTargets\n")[2].splitlines()
    assert sum(line.startswith(("  met", "  NOT MET")) for line in targets) > 10
    assert (tmp_path / "shares.svg").stat().st_size > 1_000


def test_rounds_of_two_threads_count_where_neither_waited_for_a_processor(
    benchmark_named: Callable[[str], Any],
) -> None:
    """A second alone; half of one for both; then another process takes a processor, and then one begins late."""
    codecs = benchmark_named("compare_codecs")
    alone = codecs.Stretch(0.0, 1.0, 1.0, 0.0)
    first = codecs.Stretch(5.0, 5.5, 0.5, 0.001)
    scaling = codecs.Scaling()

    scaling.add(alone, [first, codecs.Stretch(5.001, 5.5, 0.499, 0.0)])
    assert scaling.gains == [pytest.approx(2.0)]
    scaling.add(alone, [first, codecs.Stretch(5.0, 6.0, 0.5, 0.5)])
    scaling.add(alone, [first, codecs.Stretch(5.3, 5.8, 0.5, 0.0)])
    scaling.add(codecs.Stretch(0.0, 9.0, 1.0, 8.0), [first, first])
    assert len(scaling.gains) == 1
    assert str(scaling).startswith("2.00 in 1 of 4 rounds undisturbed, processor time 1.000 x one's")
    assert codecs.Scaling().gain is None


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["limit: write + sync raw"], marks=pytest.mark.slow),
        pytest.param(["limit: write + sync raw", "penstock balance"], marks=pytest.mark.slow),
    ],
    ids=["raw", "ours"],
)
def test_the_benchmark_of_saves_times_ways_of_saving_in_processes_of_their_own(
    benchmark_named: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    names: list[str],
) -> None:
    benchmark_named("compare_saves").main(["--quick", "--folder", str(tmp_path), "--only", *names])

    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("limit: write", "penstock balance"))]
    assert len(rows) == 2 * len(names), "each in the table of saves and in that of restores and memory"
    assert not any(tmp_path.iterdir())


def test_a_state_is_filled_with_one_side_of_its_pairs_and_the_other_in_turn(
    benchmark_named: Callable[[str], Any], tmp_path: Path
) -> None:
    sequences, compare_saves = benchmark_named("sequences"), benchmark_named("compare_saves")
    sequences.main(["--quick", "--folder", str(tmp_path), "--only", "gpt-fp32"])
    (sequence,) = sequences.read_sequences(tmp_path)
    before, after = map(sequence.load, sequence.group("early"))

    nbytes = compare_saves.write_states(tmp_path, tmp_path / "state", 1e6)
    state, fill = benchmark_named("peer_saves").read_states(tmp_path / "state")

    assert nbytes == sum(tensor.nbytes for tensor in state.values())
    assert len(json.loads((tmp_path / "state" / "layout.json").read_text())) == len(state)
    for side, expected in enumerate((before, after)):
        fill(side)
        for name, tensor in state.items():
            assert torch.equal(tensor[0], expected[name]), "of the one pair that there is"


class ThreadAsProcess(threading.Thread):
    """A worker beside the test: a process would load PyTorch again."""

    def kill(self) -> None:
        assert not self.is_alive()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("way", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_the_benchmark_of_refreshes_checks_the_workers_bits_and_counts_bytes(
    benchmark_named: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    resource_tracker_runs: None,
    way: str,
) -> None:
    refresh = benchmark_named("refresh")
    if way == "thread":
        threads = SimpleNamespace(Process=ThreadAsProcess)
        monkeypatch.setattr(refresh.multiprocessing, "get_context", lambda method: threads)

    refresh.main(["--quick", "--folder", str(tmp_path)])

    printed = capsys.readouterr().out
    rows = [
        line.split() for line in printed.splitlines() if line.startswith(("  early ", "  middle ", "  late "))
    ]
    assert len([row for row in rows if row[1].endswith("%")]) == 3
    assert printed.count("of the bytes of index + value") == 3
    assert not any(tmp_path.iterdir())


def test_saves_of_a_training_are_printed_next_to_their_prediction(
    benchmark_named: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark_named("predicted").main(["--quick"])

    lines = capsys.readouterr().out.splitlines()
    assert "of state, of which a baseline takes" in lines[0]
    for kind in ("blocked", "durable"):
        compared = [
            line.partition(",")[0] for line in lines if re.search(rf", {kind}: .* of 5 predicted well", line)
        ]
        assert compared == ["no fast tier", "fast tier", "drains capped", "space for one"]
