"""The benchmarks of snapshots go on running; the figures of their quick runs mean nothing."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def test_the_peers_loops_take_differences_and_planes_of_words_as_plain_integers_would(
    benchmark_named: Callable[[str], Any],
) -> None:
    peer_codecs = benchmark_named("peer_codecs")
    generator = np.random.default_rng(1)
    bits = 16  # for 32 it is the same lines, compiled for seconds more
    word = np.dtype(f"uint{bits}")
    values, reference = generator.integers(0, 2**bits, (2, 1000), dtype=word)
    loops = peer_codecs.loops_for(bits)
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


def test_the_benchmark_of_codecs_checks_times_and_judges(
    benchmark_named: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark_named("compare_codecs").main(
        ["--quick", "--only", "cnn-sgd", "--peers", str(tmp_path), "--plot", str(tmp_path / "shares.svg")]
    )

    printed = capsys.readouterr().out
    assert printed.count("MB of float32\n") == 3
    assert printed.count("whole states of") == 3
    assert printed.count("the paper's methods on 2 snapshots") == 3
    targets = printed.partition("\nTargets\n")[2].splitlines()
    assert sum(line.startswith(("  met", "  NOT MET")) for line in targets) > 10
    assert (tmp_path / "shares.svg").stat().st_size > 1_000


def test_the_benchmark_of_saves_times_ways_of_saving_in_processes_of_their_own(
    benchmark_named: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark_named("compare_saves").main(
        ["--quick", "--folder", str(tmp_path), "--only", "limit: write + sync raw", "penstock balance"]
    )

    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("limit: write", "penstock balance"))]
    assert len(rows) == 4, "both in the table of saves and in that of restores and memory"
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
            assert torch.equal(tensor, expected[name.removeprefix("0/")])


def test_the_benchmark_of_refreshes_checks_the_workers_bits_and_counts_bytes(
    benchmark_named: Callable[[str], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    benchmark_named("refresh").main(["--quick", "--folder", str(tmp_path)])

    printed = capsys.readouterr().out
    rows = [
        line.split() for line in printed.splitlines() if line.startswith(("  early ", "  middle ", "  late "))
    ]
    assert len([row for row in rows if row[1].endswith("%")]) == 3
    assert printed.count("of the bytes of index + value") == 3
    assert not any(tmp_path.iterdir())
