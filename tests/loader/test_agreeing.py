"""Ranks that make a loader agree on what they read, or are told in what they differ: each rank is a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.patience import brief, patient
from tests.ranks.in_memory import MemoryJob, run

from penstock.errors import ConfigError, DataError, PenstockError, RankError, WaitTimeout
from penstock.loader import Loader, LoaderConfig, predict, resume
from penstock.loader.transforms import DecodeRaw
from penstock.plan import BundleShuffle, FullShuffle
from penstock.policy.loading import Staging
from penstock.ranks import Ranks, alone
from penstock.store import open_source

COUNT, RANKS = 12, 3
RAW = (DecodeRaw("uint8", (4,)),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for number in range(COUNT):
        (place / f"{number:02d}.png").write_bytes(bytes([number] * 4))
    return place


def make(source: Any, own: Ranks, **options: Any) -> Loader:
    arguments: dict[str, Any] = {
        "batch_size": 6,
        "epochs": 1,
        "transforms": RAW,
        "dtype": "uint8",
        "memory": "1 MB",
        "decoders": 0,
        "rank": own.rank,
        "world_size": own.size,
        "report": None,
        "ranks": lambda: own,
        **options,
    }
    return Loader(source, **{name: value for name, value in arguments.items() if value is not ...})


def together(
    source: Any, options_of: Callable[[int], dict[str, Any]] = lambda rank: {}, size: int = RANKS
) -> Any:
    """Return what each rank reads in its first epoch, or what making its loader raised."""

    def part(ranks: Ranks) -> list[int]:
        with make(source, ranks, **options_of(ranks.rank)) as loader:
            return [int(row[0]) for batch in loader for row in batch[0]]

    return run(size, part)


def said(outcomes: list[Any]) -> str:
    """Return the message that all ranks got, as one."""
    assert [type(error) for error in outcomes] == [ConfigError] * len(outcomes), outcomes
    (message,) = {str(error) for error in outcomes}
    return message


def test_ranks_that_agree_read_each_sample_once_after_three_exchanges(folder: Path) -> None:
    job = MemoryJob(RANKS)

    def part(ranks: Ranks) -> list[int]:
        with make(folder, ranks) as loader:
            return [int(row[0]) for batch in loader for row in batch[0]]

    read = run(RANKS, part, job=job)

    assert sorted(number for part in read for number in part) == list(range(COUNT))
    assert job.sent[1:] == [3, 3]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 7}, "seed is 0 on ranks 0, 2 and 7 on rank 1"),
    "a drawn seed": ({"seed": None}, "seed is 0 on ranks 0, 2 and None on rank 1"),
    "order": (
        {"shuffle": BundleShuffle(COUNT, 2, 0.5)},
        "plan.order is {'kind': 'FullShuffle', 'samples': 12, 'seed': 0} on ranks 0, 2 and {'kind': 'BundleShuffle'",
    ),
    "batch_size": ({"batch_size": 3}, "plan.batch_size is 6 on ranks 0, 2 and 3 on rank 1"),
    "epochs": ({"epochs": 2}, "epochs is 1 on ranks 0, 2 and 2 on rank 1"),
    "drop_last": ({"drop_last": True}, "plan.drop_last is False on ranks 0, 2 and True on rank 1"),
    "share": ({"share": "host", "decoders": 1}, "share is None on ranks 0, 2 and 'host' on rank 1"),
    "split": ({"split": "strided"}, "split is "),
    "policy": ({"policy": Staging()}, "policy is "),
    "transforms": ({"transforms": (lambda data: np.zeros(4, np.uint8),)}, "transforms.steps is "),
    "dtype": ({"dtype": "float32"}, "transforms.dtype is 'uint8' on ranks 0, 2 and 'float32' on rank 1"),
    "world_size": ({"world_size": 4}, "world_size is 3 on ranks 0, 2 and 4 on rank 1"),
    "state": ({"state": {"epoch": 0, "step": 1}}, "resumes at is None on ranks 0, 2 and [0, 1] on rank 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_difference_is_named_on_all_ranks_with_both_values(folder: Path, name: str) -> None:
    other, expected = OTHERS[name]

    message = said(together(folder, lambda rank: other if rank == 1 else {}))

    assert message.startswith("the ranks of this job would not read one run: ")
    assert expected in message
    assert "on rank 1" in message


def test_another_version_on_a_rank_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = set[int]()
    monkeypatch.setattr(
        resume, "version", lambda name: "99.0" if threading.get_ident() in newer else version(name)
    )

    def options_of(rank: int) -> dict[str, Any]:
        if rank == 1:
            newer.add(threading.get_ident())
        return {}

    message = said(together(folder, options_of))

    assert f"penstock is {version('penstock')!r} on ranks 0, 2 and '99.0' on rank 1" in message


def test_a_file_that_appears_between_two_listings_is_found(folder: Path) -> None:
    """Else 12 samples and 13 are shuffled into orders that have nothing in common, and nobody says so."""
    listed = threading.Barrier(RANKS)

    def part(ranks: Ranks) -> None:
        source = open_source(folder)
        listed.wait(patient(30))
        if ranks.rank == 2:
            (folder / "12.png").write_bytes(bytes(4))
            source = open_source(folder)
        make(source, ranks).close()

    message = said(run(RANKS, part))

    assert "plan.samples is 12 on ranks 0, 1 and 13 on rank 2" in message
    assert "data.names_sizes_labels is " in message


def test_folders_that_differ_are_named_and_copies_of_one_are_taken(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    def part(ranks: Ranks) -> int:
        with make(copy if ranks.rank == 2 else folder, ranks) as loader:
            return len(loader)

    assert run(RANKS, part) == [2] * RANKS
    (copy / "03.png").rename(copy / "3.png")
    message = said(run(RANKS, part))
    assert "data.names_sizes_labels is " in message
    assert f"FlatFolder '{folder}' on ranks 0, 1 and FlatFolder '{copy}' on rank 2" in message


def test_every_data_parallel_rank_has_to_be_there(folder: Path) -> None:
    """The slip of a copied line: every process says that it is rank 0, and all read the same third."""
    message = said(together(folder, lambda rank: {"rank": 0}))

    assert message.startswith(
        "nothing reads what data-parallel ranks 1, 2 of 3 should: rank is 0 on ranks 0, 1, 2."
    )


def test_a_plan_that_one_rank_refuses_is_refused_on_all(folder: Path) -> None:
    outcomes = together(folder, lambda rank: {"shuffle": FullShuffle(13 if rank == 1 else COUNT, 0)})

    text = "shuffle is an order over 13 samples and the source has 12"
    assert str(outcomes.pop(1)).startswith(text)
    assert said(outcomes).startswith(f"rank 1 of 3: {text}")
    assert said(together(folder, lambda rank: {"batch_size": 2})).startswith(
        "the batch of epoch 0, step 0 has 2 "
    )


def test_ranks_under_tensor_parallelism_read_the_same_samples_and_one_reports(folder: Path) -> None:
    lines: list[str] = []

    read = together(folder, lambda rank: {"rank": rank // 2, "world_size": 2, "report": lines.append}, size=4)

    assert read[0] == read[1]
    assert read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(COUNT))
    assert sum("reads 12 samples" in line for line in lines) == 1
    assert not any("not compared" in line for line in lines)


def named(outcomes: list[Any], rank: int, what: str = "the start of a loader") -> Exception:
    """Return the error of a rank, which the others name."""
    own = outcomes[rank]
    assert isinstance(own, PenstockError), outcomes
    for error in outcomes[:rank] + outcomes[rank + 1 :]:
        assert type(error) is type(own), outcomes
        assert str(error) == f"rank {rank} of {RANKS}, {what}: {own}"
    return own


#: What is given to one rank alone, and what that rank raises.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an argument": ({"decoders": "two"}, "decoders is 'two'; it must be an integer"),
    "an argument that there is not": ({"num_workers": 2}, "num_workers is no argument of a loader"),
    "an argument that is missing": ({"epochs": ...}, "epochs is missing"),
    "half of a place": ({"rank": None}, "rank and world_size belong together"),
    "its place": ({"world_size": "3"}, "world_size is '3'"),
    "a mesh": ({"mesh": 3}, "mesh is given beside rank or world_size"),
    "what reports": ({"report": 3}, "report is 3; give a function"),
    "a front end": ({"front_end": 3}, "front_end is 3"),
    "memory": ({"memory": "9 B"}, "memory is 9 B"),
    "a machine": ({"machine": "nowhere.toml"}, "machine: "),
    "a trace": ({"trace": "nowhere/trace"}, "trace is 'nowhere/trace', which cannot be written"),
}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=[pytest.mark.slow] * ((number + rank) % 2))
        for number, name in enumerate(WRONG)
        for rank in (0, 1)
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_of_all_at_once(folder: Path, name: str, rank: int) -> None:
    """The rank itself gets its error as it is; the others need no time-out to know which rank, and why."""
    wrong, text = WRONG[name]

    def part(own: Ranks) -> Any:
        options = wrong if own.rank == rank else {}
        try:
            return make(folder, own, **options).close()
        finally:  # the ranks can meet again
            with make(folder, own) as loader:
                assert len(loader) == 2

    outcomes = run(RANKS, part)

    assert str(named(outcomes, rank)).startswith(text)


def test_a_data_set_that_fails_on_one_rank_is_an_error_of_all() -> None:
    class Rows:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, row: int) -> int:
            if self.fails:
                raise ZeroDivisionError("no row")
            return row

    def part(ranks: Ranks) -> None:
        make(Rows(ranks.rank == 2), ranks, transforms=(), dtype="float32")

    *others, own = run(RANKS, part)

    assert type(own) is ZeroDivisionError
    for error in others:
        assert isinstance(error, RankError)
        assert str(error).startswith("rank 2 of 3, the start of a loader: ZeroDivisionError: no row")


def test_an_argument_that_is_wrong_on_all_ranks_makes_none_wait(folder: Path) -> None:
    def part(own: Ranks) -> Any:
        with pytest.raises(ConfigError, match=r"^batch_size is 0"):
            make(folder, own, batch_size=0)
        with make(folder, own) as loader:
            return len(loader)

    assert run(RANKS, part) == [2] * RANKS


def test_a_loader_of_one_rank_alone_disturbs_no_other_where_it_is_wrong(folder: Path) -> None:
    def part(own: Ranks) -> Any:
        if own.rank == 1:
            with pytest.raises(ConfigError, match=r"^batch_size is 0"):
                make(folder, own, rank=None, world_size=1, batch_size=0)
        with make(folder, own) as loader:
            return len(loader)

    assert run(RANKS, part) == [2] * RANKS


def test_a_source_that_one_rank_cannot_open_is_an_error_of_all(folder: Path, tmp_path: Path) -> None:
    def part(ranks: Ranks) -> None:
        make(tmp_path / "nowhere" if ranks.rank == 1 else folder, ranks)

    assert isinstance(named(run(RANKS, part), 1), DataError)


def test_a_source_that_is_no_path_on_one_rank_is_an_error_of_all(folder: Path) -> None:
    outcomes = run(RANKS, lambda own: make("https://me:hush@photos" if own.rank == 0 else folder, own))

    assert "https://me:***@photos has a password in it" in str(named(outcomes, 0))


def test_a_rank_that_makes_no_loader_is_named_on_the_others(folder: Path) -> None:
    timeout_seconds = brief(1)
    outcomes = run(RANKS, lambda ranks: ranks.rank == 2 or make(folder, ranks), timeout_seconds)

    assert outcomes[2] is True
    for error in outcomes[:2]:
        assert isinstance(error, WaitTimeout)
        assert str(error).startswith(
            f"rank 2 of 3 did not arrive at the start of a loader within {timeout_seconds:g} s"
        )


def test_one_rank_compares_nothing_even_where_others_are(folder: Path) -> None:
    """A validation loader of rank 0 alone, whatever the job."""

    def part(ranks: Ranks) -> Any:
        if ranks.rank != 1:
            return None
        with make(
            folder, ranks, rank=None, world_size=1, ranks=lambda: pytest.fail("ranks were made")
        ) as loader:
            return [int(row[0]) for batch in loader for row in batch[0]]

    assert sorted(run(RANKS, part)[1]) == list(range(COUNT))


@pytest.mark.parametrize(
    ("ranks", "why"), [(None, "this process knows no other"), (alone, "ranks= has this one alone")]
)
def test_ranks_that_were_not_compared_say_so_at_the_start(folder: Path, ranks: Any, why: str) -> None:
    lines: list[str] = []
    for rank in range(2):
        with make(folder, alone(), rank=rank, world_size=2, ranks=ranks, report=lines.append) as loader:
            loader.start()

    assert [line for line in lines if "reads 12 samples" in line] == [lines[0]]
    assert lines[0].endswith(f"3 on each of 2 ranks; ranks are not compared, {why}")


def test_ranks_of_a_launcher_that_do_not_know_each_other_say_what_would_compare_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with make(folder, alone(), rank=1, world_size=2, ranks=None) as loader:
        assert loader.start_lines[0].endswith(
            "; ranks are not compared, call torch.distributed.init_process_group before to have them compared"
        )


def test_one_of_several_processes_that_reads_everything_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trainer has it that takes its processes for trainings of their own, and says that there is one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with make(folder, alone(), rank=0, world_size=1, ranks=None) as loader:
        line = loader.start_lines[0]
    assert line.endswith(
        "6 samples a step; WORLD_SIZE is 4, and this process reads everything, as world_size=1 says"
    )

    monkeypatch.delenv("WORLD_SIZE")
    with make(folder, alone(), rank=0, world_size=1, ranks=None) as loader:
        assert loader.start_lines[0].endswith("6 samples a step")


# A seed that is drawn


def draw(data: Any, rng: np.random.Generator) -> Any:
    return rng.integers(0, 255, 4, np.uint8)


def test_without_a_seed_rank_0_draws_one_for_all_and_says_which(folder: Path) -> None:
    lines: list[str] = []

    def part(ranks: Ranks) -> Any:
        with make(folder, ranks, seed=None, transforms=[draw], report=lines.append) as loader:
            assert loader.config.seed is None
            return loader.state_dict(), [row.tolist() for batch in loader for row in batch[0]]

    outcomes = run(RANKS, part)

    (first, *_), rows = zip(*outcomes, strict=True)
    assert {json.dumps(state) for state, _ in outcomes} == {json.dumps(first)}
    seed = first["transforms"]["seed"]
    assert f"FullShuffle(seed={seed})" in next(line for line in lines if "reads" in line)
    # Another run draws another one; a run with that seed reads the same.
    assert run(RANKS, part)[0][0]["transforms"]["seed"] != seed
    with make(folder, alone(), seed=seed, world_size=1, transforms=[draw]) as one:
        assert [row.tolist() for batch in one for row in batch[0]] == [
            row
            for batch in range(2)
            for rank in range(RANKS)
            for row in rows[rank][2 * batch : 2 * batch + 2]
        ]


def test_a_drawn_seed_comes_back_with_the_state(folder: Path) -> None:
    with make(folder, alone(), world_size=1, seed=None) as loader:
        state, expected = loader.state_dict(), [batch[0].tolist() for batch in loader]

    with make(folder, alone(), world_size=1, seed=None, state=state) as again:
        assert [batch[0].tolist() for batch in again] == expected
        assert again.state_dict()["plan"] == state["plan"]
    with (
        make(folder, alone(), world_size=1, seed=None) as other,
        pytest.raises(
            ConfigError, match=rf"was drawn, and the state is of seed {state['plan']['order']['seed']}"
        ),
    ):
        other.load_state_dict(state)


def test_a_seed_cannot_be_drawn_by_ranks_that_cannot_tell_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"seed is None, and one cannot be drawn for all ranks.*give seed="):
        make(folder, alone(), rank=1, world_size=2, seed=None, ranks=None)


def test_a_configuration_whose_seed_is_to_be_drawn_can_be_printed_and_predicted(folder: Path) -> None:
    config = LoaderConfig(
        folder, batch_size=6, epochs=1, transforms=RAW, dtype="uint8", seed=None, decoders=1
    )

    assert "seed=None" in repr(config)
    assert config != LoaderConfig(folder, batch_size=6, epochs=1, transforms=RAW, dtype="uint8", decoders=1)
    with pytest.raises(ConfigError, match="machine is not known"):
        predict(config)


def test_states_that_are_loaded_must_be_of_one_step(folder: Path) -> None:
    def goes_on(step_of: Callable[[int], int]) -> Any:
        def part(ranks: Ranks) -> tuple[int, int]:
            with make(folder, ranks) as loader:
                loader.load_state_dict(loader.state_at(0, step_of(ranks.rank)))
                return loader.position

        return run(RANKS, part)

    assert goes_on(lambda rank: 1) == [(0, 1)] * RANKS
    for error in goes_on(lambda rank: rank // 2):
        assert isinstance(error, ConfigError)
        assert str(error).startswith(
            "state is of epoch 0, step 0 on ranks 0, 1 and epoch 0, step 1 on rank 2: batches"
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_is_wrong_on_one_rank_is_an_error_of_all_at_once(folder: Path, rank: int) -> None:
    def loads(own: Ranks) -> Any:
        with make(folder, own) as loader:
            state = loader.state_at(0, 1)
            if own.rank == rank:
                state["plan"]["batch_size"] = 4
            loader.load_state_dict(state)

    def begins(own: Ranks) -> Any:
        with make(folder, own) as loader:
            state = loader.state_at(0, 1)
        if own.rank == rank:
            state["data"]["kind"] = "ImageFolder"
        make(folder, own, state=state).close()

    text = str(named(run(RANKS, loads), rank, "a loader's load_state_dict"))
    assert text.startswith("state is of another run: plan.batch_size was 4 and is 6 here")
    assert "data.kind was 'ImageFolder'" in str(named(run(RANKS, begins), rank))


def test_a_loader_that_has_begun_on_one_rank_loads_no_state_on_any(folder: Path) -> None:
    def part(own: Ranks) -> Any:
        with make(folder, own) as loader:
            state = loader.state_dict()
            if own.rank == 2:
                next(iter(loader))
            loader.load_state_dict(state)

    text = str(named(run(RANKS, part), 2, "a loader's load_state_dict"))
    assert text.startswith("load_state_dict() comes before the first batch")


def test_a_rank_that_loads_no_state_is_named_on_the_others(folder: Path) -> None:
    def part(ranks: Ranks) -> None:
        with make(folder, ranks) as loader:
            if ranks.rank == 0:
                ranks._timeout_seconds = 0.5
                loader.load_state_dict(loader.state_at(0, 1))

    error, *_ = run(RANKS, part)
    assert isinstance(error, WaitTimeout)
    assert "ranks 1, 2" in str(error)
