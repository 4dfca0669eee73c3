"""Samples that a data set makes of stored bytes: a loader reads and keeps these as those of a source."""

from __future__ import annotations

import contextlib
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tests.for_each import for_each
from tests.loader.sharing_data import Counted, expected
from tests.loader.test_source_samples import members
from tests.patience import patient
from tests.policy.test_scheduler import machine
from tests.ranks.in_memory import run
from tests.store.tar_files import npy, write
from tests.store.web_server import serving

from penstock.errors import ConfigError
from penstock.loader import Loader, LoaderConfig, SourceSamples, TarSamples, mapped, opened, predict
from penstock.loader.skips import BadSample, SkipList
from penstock.plan import Explicit
from penstock.policy import Scheduler
from penstock.ranks import Ranks, alone
from penstock.store import Arrays, FlatFolder, JsonLines
from penstock.trace import Kind

SAMPLES, EPOCHS = 200, 3
#: Samples that are looked at before the first batch.
PROBES = 16


def as_row(sample: tuple[bytes, int], rng: np.random.Generator) -> dict[str, Any]:
    return {"row": np.frombuffer(sample[0], np.uint8), "id": sample[1], "draw": rng.random()}


def epochs_of(dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of all epochs."""
    arguments: dict[str, Any] = {
        "batch_size": 32,
        "epochs": EPOCHS,
        "seed": 3,
        "memory": "16 MB",
        "report": None,
    }
    with Loader(dataset, **(arguments | options)) as loader:
        return [batch for _ in range(EPOCHS) for batch in loader]


def bits_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: bits_of(value) for name, value in batch.items()}
    return (batch.dtype, batch.tolist()) if hasattr(batch, "tolist") else batch


@for_each(("options", "most"), [({}, EPOCHS), ({"policy": "frequency"}, 1), ({"local_disk": "disk"}, 1)])
def test_bytes_are_read_once_for_all_epochs_if_that_is_asked_for_and_batches_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Counted(SAMPLES)
    expected_batches = epochs_of(SourceSamples(Counted(SAMPLES)).map(as_row))

    found = epochs_of(SourceSamples(source).map(as_row), **options)

    assert list(map(bits_of, found)) == list(map(bits_of, expected_batches))
    assert all((each["row"] == expected(each["id"])).all() for each in found)
    assert most * SAMPLES <= source.reads.sum() <= most * SAMPLES + PROBES


def by_field(samples: list[Any]) -> dict[str, np.ndarray]:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


@for_each("options", [{}, {"collate_fn": by_field}])
def test_ranks_and_jobs_of_a_host_read_each_sample_once_for_all(options: dict[str, Any]) -> None:
    alone_ = epochs_of(SourceSamples(Counted(SAMPLES)).map(as_row))

    def part(ranks: Ranks, source: Counted, share: str, together: threading.Barrier) -> list[Any]:
        found = []
        of_rank = {"rank": ranks.rank, "world_size": ranks.size, "ranks": lambda: ranks}
        dataset = SourceSamples(source).map(as_row)
        arguments = {
            "batch_size": 32,
            "epochs": EPOCHS,
            "seed": 3,
            "memory": "4 MB",
            "report": None,
            **options,
        }
        with (
            contextlib.ExitStack() as failing,
            Loader(dataset, share=share, **arguments, **of_rank) as loader,  # type: ignore[arg-type]
        ):
            failing.callback(together.abort)
            for _ in range(EPOCHS):
                for batch in loader:
                    found.append(bits_of(batch))
                    together.wait(patient(30))
            failing.pop_all()
        return found

    sources, together = [Counted(SAMPLES) for _ in range(2)], threading.Barrier(2)
    with patch.object(Scheduler, "waited", lambda *_: []):  # a read that is late is made twice
        ranks = run(2, lambda ranks: part(ranks, sources[ranks.rank], "host", together))
        assert not [each for each in ranks if isinstance(each, BaseException)], ranks
        assert [one["id"][1] + other["id"][1] for one, other in zip(*ranks, strict=True)] == [
            bits_of(batch)["id"][1] for batch in alone_
        ]
        assert sum(source.reads.sum() for source in sources) <= SAMPLES + 2 * PROBES

        sources = [Counted(SAMPLES) for _ in range(2)]
        name = secrets.token_hex(8)
        for source in sources:
            source.fingerprint = name
        with ThreadPoolExecutor(2) as pool:
            jobs = list(pool.map(lambda source: part(alone(), source, "jobs", together), sources))
    assert jobs == [list(map(bits_of, alone_))] * 2
    assert sum(source.reads.sum() for source in sources) <= SAMPLES + 2 * PROBES


@pytest.mark.usefixtures("obstore_threads")
def test_members_of_shards_at_an_address_stay_in_memory(tmp_path: Path) -> None:
    content = {name: data for key in range(24) for name, data in members(key).items()}
    lines: list[str] = []
    with serving({"0.tar": write(tmp_path / "0.tar", content).read_bytes()}) as server:
        samples = TarSamples(f"{server.address}/0.tar", ["txt", "cls", "png"])
        requests = []
        with Loader(samples, batch_size=8, epochs=EPOCHS, shuffle=False, report=lines.append) as loader:
            for _ in range(EPOCHS):
                found = list(loader)
                requests.append(len(server.requests))

    assert [text for batch in found for text in batch["txt"]] == [f"picture {key} ü" for key in range(24)]
    assert np.concatenate([batch["cls"] for batch in found]).tolist() == list(range(24))
    assert requests[1:] == requests[:1] * 2
    assert any("to keep all samples for later epochs (policy frequency)" in line for line in lines)


def test_a_member_that_is_bad_is_named_and_left_out(tmp_path: Path) -> None:
    content = {f"{key}.npy": npy(np.arange(2) + key) if key != 3 else b"no array" for key in range(6)}
    samples = TarSamples(write(tmp_path / "a.tar", content))
    errors = []

    def note(error: Exception, sample: int) -> str:
        errors.append((sample, str(error)))
        return "skip"

    arguments = {"batch_size": 6, "epochs": 1, "shuffle": False, "report": None, "policy": "frequency"}
    with Loader(samples, on_error=note, **arguments) as loader:  # type: ignore[arg-type]
        (batch,) = loader

    ((sample, error),) = errors
    assert sample == 3
    assert "a.tar: 3.npy, taken as npy" in error
    assert batch["npy"].tolist() == [[key, key + 1] for key in (0, 1, 2, 4, 5)]


@pytest.mark.parametrize("is_far", [True, False])
def test_files_that_are_mounted_over_the_network_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    content = {f"{number:03}.cls": b"%d" % number for number in range(SAMPLES)}
    (tmp_path / "files").mkdir()
    for name, data in content.items():
        (tmp_path / "files" / name).write_bytes(data)
    of_files = SourceSamples(FlatFolder(tmp_path / "files", extensions=None)).map(
        lambda data: {"cls": int(data)}
    )
    monkeypatch.setattr(opened, "is_on_network", lambda path: is_far)

    for samples in (TarSamples(write(tmp_path / "a.tar", content)), of_files):
        lines: list[str] = []
        found = epochs_of(samples, report=lines.append, shuffle=False)

        assert [number for batch in found for number in batch["cls"].tolist()] == EPOCHS * list(
            range(SAMPLES)
        )
        assert any("to keep all samples for later epochs" in line for line in lines) is is_far


def joined(samples: list[Any]) -> np.ndarray:
    return np.stack([sample["row"] for sample in samples])


@for_each(
    ("options", "most"),
    [
        ({}, EPOCHS),
        ({"policy": "frequency"}, 1),
        ({"local_disk": "disk"}, 1),
        ({"share": "jobs"}, 1),
        ({"readers": 3, "memory": "2 MB"}, 1),
        ({"readers": 3, "policy": "staging"}, EPOCHS),
    ],
)
def test_batches_that_a_function_makes_are_of_bytes_that_are_read_ahead_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Counted(SAMPLES)
    source.fingerprint = secrets.token_hex(8)
    drawn = [np.random.default_rng(epoch).integers(SAMPLES, size=SAMPLES) for epoch in range(EPOCHS)]
    for order in (True, Explicit(drawn, SAMPLES)):  # in which a batch has some samples twice
        arguments: dict[str, Any] = {"collate_fn": joined, "shuffle": order}
        expected_batches = epochs_of(SourceSamples(Counted(SAMPLES)).map(as_row), **arguments)
        source.reads[:] = 0
        found = epochs_of(SourceSamples(source).map(as_row), **arguments, **options)

        for one, other in zip(found, expected_batches, strict=True):
            np.testing.assert_array_equal(one, other)
        assert source.reads.sum() <= most * SAMPLES + PROBES


def test_a_function_gets_all_of_a_batch_of_which_memory_has_lost_a_sample() -> None:
    dataset = SourceSamples(Counted(SAMPLES)).map(as_row)
    arguments: dict[str, Any] = {"batch_size": 32, "seed": 3, "memory": "16 MB", "report": None}
    arguments |= {"epochs": 2, "policy": "frequency", "collate_fn": joined}
    expected_batches = epochs_of(dataset, **arguments | {"epochs": EPOCHS})[: 2 * 7]
    with Loader(dataset, **arguments) as loader:
        found = list(loader)
        tier = next(iter(loader._parts.fetcher._tiers.values()))  # type: ignore[attr-defined]
        tier.evict(np.arange(0, SAMPLES, 40))
        found += list(loader)

    for one, other in zip(found, expected_batches, strict=True):
        np.testing.assert_array_equal(one, other)


class Held:
    """An object that keeps the row that it was made of."""

    def __init__(self, row: np.ndarray) -> None:
        self.row = row


def test_what_a_data_set_keeps_of_a_sample_stays_what_it_was(tmp_path: Path) -> None:
    rows = np.arange(SAMPLES * 4, dtype=np.int32).reshape(SAMPLES, 4)
    np.save(tmp_path / "a.npy", rows)
    held = SourceSamples(Arrays(tmp_path / "a.npy")).map(lambda row: {"sum": row.sum(), "held": Held(row)})

    found = epochs_of(held, policy="staging", shuffle=False)

    assert [each.row.tolist() for batch in found for each in batch["held"]] == EPOCHS * rows.tolist()


@for_each(
    ("options", "beside", "message"),
    [
        ({"cache": "rows"}, {"policy": "staging"}, 'with cache="rows"'),
        ({"workers": 2}, {"policy": "staging"}, "with workers=2"),
        ({"workers": 2}, {"policy": "frequency"}, "with workers=2"),
        ({"decoders": 0}, {"policy": "frequency"}, "with decoders=0"),
    ],
)
def test_what_has_the_data_set_read_by_itself_is_refused_beside_what_keeps_bytes(
    options: dict[str, Any], beside: dict[str, Any], message: str
) -> None:
    samples = SourceSamples(Counted(SAMPLES))

    with_disk: list[dict[str, Any]] = [] if "cache" in options else [{"local_disk": "/tmp"}]
    for more in ({"share": "host"}, beside, *with_disk):
        with pytest.raises(ConfigError, match=f"the data set of Counted {message}"):
            LoaderConfig(samples, batch_size=2, epochs=1, **more, **options)
    with pytest.raises(ConfigError, match="policy is 'frequency', but the data set range reads by itself"):
        LoaderConfig(range(9), batch_size=2, epochs=1, policy="frequency")


def test_samples_that_are_kept_as_they_were_made_go_with_their_policy_and_a_disk(tmp_path: Path) -> None:
    given: dict[str, Any] = {"policy": "frequency", "local_disk": tmp_path, "cache": "rows"}

    assert (
        LoaderConfig(SourceSamples(Counted(SAMPLES)), batch_size=2, epochs=1, **given).policy == "frequency"
    )


def test_what_is_read_for_a_data_set_is_predicted(tmp_path: Path) -> None:
    samples = SourceSamples(Counted(SAMPLES)).map(as_row)
    arguments: dict[str, Any] = {"batch_size": 32, "epochs": EPOCHS, "seed": 0}
    on: dict[str, Any] = {"machine": machine(), "step_seconds": 0.1}

    with Loader(samples, policy="frequency", report=None, **arguments) as loader:
        predicted = loader.predict(**on)
    ahead = predict(LoaderConfig(samples, policy="frequency", **arguments), **on)
    refused = 'policy="frequency", has the loader read it, and that can be'
    with Loader(samples, report=None, **arguments) as loader, pytest.raises(ConfigError, match=refused):
        loader.predict(**on)
    with pytest.raises(ConfigError, match=refused):
        predict(LoaderConfig(samples, **arguments), **on)

    for each in (predicted, ahead):
        assert each.spans["samples"][each.spans["kind"] == Kind.READ].sum() == SAMPLES


def test_bad_samples_are_left_out_by_their_list(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"a": {number}}}\n' for number in range(6)))
    lines = JsonLines(tmp_path / "a.jsonl")
    found = SkipList.of(lines)
    found.checked, found.bad[2] = 6, BadSample(2, "line 3", "")
    found.write(tmp_path / "bad.jsonl")

    for samples in (SourceSamples(lines), mapped(SourceSamples(lines).map(dict), dict)):
        with Loader(
            samples, batch_size=6, epochs=1, shuffle=False, skip=tmp_path / "bad.jsonl", report=None
        ) as loader:
            (batch,) = loader
        assert batch["a"].tolist() == [0, 1, 3, 4, 5]


def test_of_an_empty_sample_nothing_is_kept(tmp_path: Path) -> None:
    samples = TarSamples(write(tmp_path / "a.tar", {"0.txt": b"a", "1.txt": b""}))

    with pytest.raises(ConfigError, match=r"share= is given, and \S+a\.tar: 1 is empty"):
        Loader(samples, batch_size=2, epochs=1, share="host", report=None)
    with Loader(samples, batch_size=2, epochs=1, shuffle=False, report=None) as loader:
        assert [batch["txt"] for batch in loader] == [["a", ""]]
