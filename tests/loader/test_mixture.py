"""Mixtures in a loader: what arrives, on any number of threads and ranks, and after a resume."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

import penstock
from penstock.errors import ConfigError
from penstock.loader import Loader, LoaderConfig, PackedDocuments, SourceSamples, mapped, mix
from penstock.loader.skips import BadSample, SkipList
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import FullShuffle, Mixture, TokenBudget
from penstock.ranks import alone
from penstock.store import ArrowTable, JsonLines, MixedSource, ParquetFiles, Tokens
from penstock.trace import read_trace


class Numbers:
    """A data set whose samples are its own number and theirs."""

    def __init__(self, own: int, count: int) -> None:
        self.own, self.count = own, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return np.array([self.own, index], np.int64)


class Drawing(Numbers):
    def __getitem__(self, index: int, rng: np.random.Generator) -> Any:  # type: ignore[override]
        return np.array([self.own, rng.integers(1 << 30)], np.int64)


class InLists(Numbers):
    def __getitems__(self, samples: list[int]) -> list[Any]:
        return [self[sample] for sample in samples]


class Epochs(Numbers):
    def __getitem__(self, index: int, epoch: int) -> Any:  # type: ignore[override]
        return np.array([self.own, 1000 * epoch + index], np.int64)


def epochs_of(source: Any, **arguments: Any) -> list[NDArray[np.int64]]:
    settings: dict[str, Any] = {"batch_size": 16, "epochs": 2, "seed": 3, "report": None, **arguments}
    with Loader(source, **settings) as loader:
        return [np.concatenate(list(loader)) for _ in range(settings["epochs"])]


def tokens(folder: Path, *counts: int) -> list[Tokens]:
    """Sources of windows of one token, whose numbers are 1000 * source + window."""
    found = []
    for number, count in enumerate(counts):
        np.save(folder / f"{number}.npy", (1000 * number + np.arange(count)).astype(np.uint16))
        found.append(Tokens(folder / f"{number}.npy", length=1, ahead=0))
    return found


def texts(folder: Path, *counts: int) -> list[ParquetFiles]:
    """Sources of text, "source row", each of a class of its own."""
    found = []
    for number, count in enumerate(counts):
        rows = [f"{number} {row}" for row in range(count)]
        pq.write_table(
            pa.table({"text": rows, "label": [f"class {number}"] * count}), folder / f"{number}.parquet"
        )
        found.append(ParquetFiles(folder / f"{number}.parquet", sample="text", label="label"))
    return found


def test_a_mixture_of_data_sets_gives_what_its_order_says() -> None:
    sets = [Numbers(0, 100), Numbers(1, 20)]
    expected = Mixture((100, 20), [3, 1], at_end="repeat", seed=3)
    both: Any = ConcatDataset(sets)  # type: ignore[arg-type]
    for decoders in (0, 2):
        found = epochs_of(mix(sets, [3, 1], at_end="repeat"), decoders=decoders)
        for epoch, samples in enumerate(found):
            ids = expected.at(epoch, np.arange(expected.length(epoch)))
            assert samples.tolist() == [both[sample].tolist() for sample in ids.tolist()]


def test_a_mixture_of_sources_gives_what_its_order_says_and_shuffle_false_keeps_their_order(
    tmp_path: Path,
) -> None:
    mixed = mix(tokens(tmp_path, 60, 10, 30), [0.5, 0.2, 0.3], at_end="drop")
    assert isinstance(mixed, MixedSource)

    for samples in epochs_of(mixed, decoders=2):
        assert sorted(samples.ravel().tolist()) == [*range(60), *range(1000, 1010), *range(2000, 2030)]
        assert np.bincount(samples.ravel()[:50] // 1000).tolist() == [25, 10, 15]
    for samples in epochs_of(mixed, shuffle=False):
        of_first = samples.ravel()[samples.ravel() < 1000]
        assert of_first.tolist() == list(range(60))


def test_paths_are_opened(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.zeros((5, 2), np.float32))
    mixed = mix([tmp_path / "a.npy", str(tmp_path / "b.npy")], [1, 1], at_end="stop")
    assert len(mixed) == 10


def test_ranks_share_a_mixture_and_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    mixed = mix(tokens(tmp_path, 61, 10), [(0, [1, 1]), (4, [5, 1])], at_end="repeat")
    arguments: dict[str, Any] = {"batch_size": 12, "epochs": 2, "seed": 5, "report": None, "drop_last": True}
    with Loader(mixed, **arguments) as loader:
        whole = [batch.copy() for _ in range(2) for batch in loader]
    parts = []
    for rank in range(2):
        with Loader(mixed, rank=rank, world_size=2, ranks=alone, **arguments) as loader:
            parts.append([batch.copy() for _ in range(2) for batch in loader])
    assert [np.concatenate(each).tolist() for each in zip(*parts, strict=True)] == [
        each.tolist() for each in whole
    ]

    with Loader(mixed, **arguments) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(pickle.loads(pickle.dumps(mixed)), state=state, **arguments) as loader:
        rest = [batch.copy() for batch in loader] + [batch.copy() for batch in loader]
    assert [each.tolist() for each in rest] == [each.tolist() for each in whole[5:]]
    other = mix(mixed.sources, [(0, [1, 1]), (4, [4, 1])], at_end="repeat")
    with pytest.raises(ConfigError, match=r"plan\.order was .*\[5, 1\].* and is .*\[4, 1\]"):
        Loader(other, state=state, **arguments)


def test_draws_are_those_of_the_sample_whatever_is_mixed_with_it_and_epochs_are_handed_on() -> None:
    sets = [Drawing(0, 30), Epochs(1, 10), InLists(2, 10)]
    mixed = mix(sets, [3, 1, 1], at_end="drop")
    one, two = (epochs_of(mixed, decoders=decoders) for decoders in (0, 3))

    assert [each.tolist() for each in one] == [each.tolist() for each in two]
    for epoch, samples in enumerate(one):
        assert sorted(samples[samples[:, 0] == 1, 1].tolist()) == list(range(1000 * epoch, 1000 * epoch + 10))
        assert sorted(samples[samples[:, 0] == 2, 1].tolist()) == list(range(10))
        assert len(set(samples[samples[:, 0] == 0, 1].tolist())) == 30


def test_a_trace_has_the_mixture_and_the_start_says_how_often_sources_are_read(tmp_path: Path) -> None:
    lines: list[str] = []
    mixed = mix(tokens(tmp_path, 60, 10), [3, 1], at_end="repeat")
    arguments: dict[str, Any] = {"batch_size": 16, "epochs": 2, "seed": 3}
    with Loader(mixed, report=lines.append, trace=tmp_path / "run.trace", **arguments) as loader:
        for _ in range(2):
            for _ in loader:
                pass
    plan: Any = read_trace(tmp_path / "run.trace").meta["plan"]

    assert plan["order"]["kind"] == "Mixture"
    assert any(
        "an epoch of the mixture reads 60 of source 0 (1 times its 60), 20 of" in line for line in lines
    )
    store = SharedStore(None, Curve(((1, 1e8),)), 1e-4)
    machine = Machine(store, (StorageClass("staging", 1 << 24, 2, Curve(((1, 1e9),))),), decode_threads=2)
    predicted = penstock.predict(LoaderConfig(mixed, **arguments), machine=machine, step_seconds=0.001)
    assert [epoch.samples for epoch in predicted.epochs()] == [80, 80]


def test_a_list_of_bad_samples_leaves_them_out_of_their_sources(tmp_path: Path) -> None:
    mixed = mix(tokens(tmp_path, 6, 4), [1, 1], at_end="drop")
    assert isinstance(mixed, MixedSource)
    found = SkipList.of(mixed)
    found.checked = 10
    found.bad = {sample: BadSample(sample, mixed.describe(sample), "bad") for sample in (2, 9)}
    found.write(tmp_path / "skips.jsonl")
    (samples, _) = epochs_of(mixed, skip=tmp_path / "skips.jsonl")
    assert sorted(samples.ravel().tolist()) == [0, 1, 3, 4, 5, 1000, 1001, 1002]


def test_an_error_names_the_source_of_the_sample() -> None:
    class Failing(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("no such row")

    mixed = mix([Numbers(0, 10), Failing(1, 5)], [1, 1], at_end="stop")
    with pytest.raises(ValueError, match="no such row") as caught:
        epochs_of(mixed)
    assert any("Failing[" in note and "of source 1" in note for note in caught.value.__notes__)


def test_an_error_names_the_row_that_a_sample_of_mixed_text_is_made_of(tmp_path: Path) -> None:
    sources = texts(tmp_path, 4, 4)
    of_samples = mix([SourceSamples(source) for source in sources], [1, 1], at_end="stop")
    of_sources: Any = mix(sources, [1, 1], at_end="stop")
    row = f"while loading {tmp_path / '1.parquet'}: row 2"

    for source, note in ((SourceSamples(of_sources), row), (of_samples, f"{row}, of source 1")):
        with pytest.raises(ValueError, match="no two") as caught:
            epochs_of(mapped(source, no_two), shuffle=False)
        assert note in caught.value.__notes__


def no_two(sample: Any) -> Any:
    if sample[0] == "1 2":
        raise ValueError("no two")
    return np.array([len(sample[0])])


def test_a_mixture_of_text_is_read_by_its_weights_however_it_is_given(tmp_path: Path) -> None:
    sources = texts(tmp_path, 40, 10)
    of_sources: Any = mix(sources, [1, 3], at_end="repeat")
    of_samples = mix([SourceSamples(source) for source in sources], [1, 3], at_end="repeat")
    order = Mixture((40, 10), [1, 3], at_end="repeat", seed=3)
    rows = [(0, row) for row in range(40)] + [(1, row) for row in range(10)]
    expected = [rows[sample] for sample in order.at(0, np.arange(order.length(0))).tolist()]
    samples = SourceSamples(of_sources)

    for source, has_classes_of_all in (
        (of_sources, True),
        (samples, True),
        (samples.map(tuple), True),
        (of_samples, False),
        (mapped(of_samples, tuple), False),
    ):
        with Loader(source, batch_size=16, epochs=1, seed=3, report=None) as loader:
            found = [each for text, label in loader for each in zip(text, label.tolist(), strict=True)]
        assert [text for text, _ in found] == [f"{number} {row}" for number, row in expected]
        assert [label for _, label in found] == [number * has_classes_of_all for number, _ in expected]


def test_text_is_not_mixed_with_bytes_or_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    text, blobs = ArrowTable(pa.table({"text": ["a"]})), ArrowTable(pa.table({"blob": [b"a"]}))
    for other, kind in ((blobs, "bytes"), (JsonLines(tmp_path / "a.jsonl"), "lines of JSON")):
        mixed: Any = mix([text, other], [1, 1], at_end="stop")
        for read in (epochs_of, SourceSamples):
            with pytest.raises(
                ConfigError, match=f"source 1 of the mixture, .*, has {kind}, and source 0 has text"
            ):
                read(mixed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"shuffle": FullShuffle(15)},
            "shuffle is given with a mixture, whose weights say which source comes next",
        ),
        *(
            (
                {"batch_sampler": sampler, "batch_size": None},
                "batch_sampler is given with a mixture, .* ConcatDataset .*tokens, mix PackedDocuments of each",
            )
            for sampler in ([[0, 1]], TokenBudget(np.ones(15, np.int64), tokens=4))
        ),
    ],
)
def test_what_would_leave_the_weights_out_is_refused(arguments: dict[str, Any], message: str) -> None:
    mixed = mix([Numbers(0, 10), Numbers(1, 5)], [1, 1], at_end="stop")
    for source in (mixed, mapped(mixed, len)):
        with pytest.raises(ConfigError, match=message):
            epochs_of(source, **arguments)


def test_packed_rows_are_of_no_mixture() -> None:
    mixed = mix([Numbers(0, 10), Numbers(1, 5)], [1, 1], at_end="stop")
    with pytest.raises(ConfigError, match="dataset is a mixture, and rows are packed without its weights"):
        PackedDocuments(mapped(mixed, list), np.full(15, 2), tokens=4, too_long="split")


def test_what_cannot_be_mixed_is_refused_by_name(tmp_path: Path) -> None:
    (source,) = tokens(tmp_path, 5)
    with pytest.raises(
        ConfigError, match="source 1 of the mixture, Numbers, is a data set, and source 0, Tokens, is"
    ):
        mix([source, Numbers(1, 5)], [1, 1], at_end="stop")
    with pytest.raises(ConfigError, match=r"sources is \[\]; it is a list of folders, sources or data sets"):
        mix([], [], at_end="stop")
    with pytest.raises(ConfigError, match="source 1 of the mixture is 5; it is a folder"):
        mix([Numbers(0, 5), 5], [1, 1], at_end="stop")  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="has no samples: leave it out of the mixture"):
        mix([Numbers(0, 5), Numbers(1, 0)], [1, 1], at_end="stop")
    inner = mix([Numbers(0, 5), Numbers(1, 5)], [1, 9], at_end="repeat")
    for mixed in (inner, mapped(inner, list)):
        with pytest.raises(ConfigError, match=r"source 1 of the mixture, .*, is a mixture itself"):
            mix([Numbers(0, 5), mixed], [1, 1], at_end="repeat")
