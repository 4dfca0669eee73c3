"""What ranks save as one state is one: what differs between them is found before it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.snapshot_files import opened, same
from tests.ranks.in_memory import run

from penstock.checkpoint.state.flatten import Shard
from penstock.errors import ConfigError
from penstock.ranks import Ranks


def saved(folder: Path, state_of: Any, size: int = 3) -> tuple[list[Any], list[str]]:
    """Save each rank's state; return what was saved or raised on each, and what was told."""
    lines: list[str] = []

    def part(ranks: Ranks) -> Any:
        with opened(folder, ranks=lambda: ranks, report=lines.append) as store:
            return store.save(1, state_of(ranks.rank)).wait().step

    return run(size, part), lines


def generator_state(seed: int) -> Any:
    return torch.Generator().manual_seed(seed).get_state()


@pytest.mark.parametrize(
    ("own", "name"),
    [
        (lambda rank: {"random": {"torch": generator_state(rank)}}, "random/torch"),
        (lambda rank: {"loader": {"place": [1, rank // 2]}}, "loader/place"),
        (lambda rank: {"loader": {"seen": np.arange(3) + rank // 2}}, "loader/seen"),
        (lambda rank: {"log": [{"loss": 0.5, "step": rank // 2}]}, "log"),
    ],
)
def test_what_a_rank_has_for_itself_is_no_part_of_the_state_of_all(folder: Path, own: Any, name: str) -> None:
    errors, _ = saved(folder, lambda rank: {"model": np.zeros(5), **own(rank)})

    other = 1 if name == "random/torch" else 2
    expected = (
        f"{name} differs between rank 0 and rank {other}, .* give what a rank has for itself as per_rank="
    )
    for error in errors:
        assert isinstance(error, ConfigError)
        with pytest.raises(ConfigError, match=expected):
            raise error
    assert not list(folder.glob("step-*"))


def test_floats_that_differ_are_reported_and_kept_as_rank_0_has_them(folder: Path) -> None:
    """The running means of a batch norm: each rank has seen other batches, and DDP sends those of rank 0 to all.

    The large array, which all ranks have alike, is written by rank 0: who writes least would write the means.
    """

    def state(rank: int) -> dict[str, Any]:
        means = {f"mean {number}": np.array([0.5, rank]) for number in range(4)}
        return {"model": np.zeros(100), **means, "log": [{"seconds": rank / 8, "step": 5}]}

    steps, lines = saved(folder, state)

    assert steps == [1, 1, 1]
    assert lines[0] == "step 1: mean 0, mean 1, mean 2 and 2 more differ between ranks: kept as rank 0 has it"
    with opened(folder) as store:
        assert same(dict(store.restore()), state(0))


def test_states_that_are_equal_are_equal_in_whatever_order_and_place(folder: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        values = {"a": 1.5, "b": np.arange(7), "c": float("nan")}
        keys = sorted(values, reverse=rank == 1)
        return {key: values[key] for key in keys} | {"rows": Shard(np.full(2, rank), (6,), (2 * rank,))}

    steps, lines = saved(folder, state)

    assert steps == [1, 1, 1]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (lambda rank: {"step": rank // 2}, "step differs between rank 0 and rank 2"),
        (lambda rank: {"run": f"run {rank}"}, "run differs between rank 0 and rank 1"),
        (lambda rank: {"seen": np.arange(3) + rank}, "seen differs between rank 0 and rank 1"),
        (lambda rank: {"late": True} if rank == 2 else {}, "rank 2 has late, which rank 0 has not"),
        (lambda rank: {"first": "a"} if rank == 0 else {}, "rank 0 has first, which rank 1 has not"),
        (lambda rank: {"x": np.ones(3)} if rank == 0 else {}, "rank 0 has x, which rank 1 has not"),
        (lambda rank: {"x": np.ones(3)} if rank == 1 else {}, "rank 1 has x, which rank 0 has not"),
        (lambda rank: {"log": {"a": 1} if rank == 1 else {}}, "rank 1 has log/a, which rank 0 has not"),
    ],
)
@pytest.mark.parametrize("has_parts", [False, True], ids=["alone", "beside parts of an array"])
def test_whatever_else_the_ranks_hold_what_they_do_not_hold_alike_is_named_on_all(
    folder: Path, own: Any, named: str, has_parts: bool
) -> None:
    def state(rank: int) -> dict[str, Any]:
        parts = {"rows": Shard(np.full(2, float(rank)), (6,), (2 * rank,))} if has_parts else {}
        return {"model": np.zeros(5), **parts, **own(rank)}

    errors, _ = saved(folder, state)

    for error in errors:
        assert isinstance(error, ConfigError)
        assert str(error).startswith(named)
        assert "per_rank" in str(error)
    assert not list(folder.glob("step-*"))


def test_an_array_that_one_rank_has_whole_and_the_others_in_empty_parts_is_no_difference(
    folder: Path,
) -> None:
    """A small array under FSDP: the first rank has all rows of it, the others none."""

    def state(rank: int) -> dict[str, Any]:
        own = (lambda array: array if rank == 1 else array[:0])(np.arange(4))
        return {"ids": Shard(own, (4,), (0,) if rank == 1 else (4,)), "mean": np.array([rank / 2]), "n": 5}

    steps, lines = saved(folder, state)

    assert steps == [1, 1, 1]
    assert lines[0] == "step 1: mean differs between ranks: kept as rank 0 has it"
    with opened(folder) as store:
        np.testing.assert_array_equal(store.restore()["ids"], np.arange(4))
