"""Some of a source's samples as a source, and splits."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.loader import Loader, LoaderConfig, predict
from penstock.loader.resume import describe_data
from penstock.loader.transforms import DecodeRaw
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.store import Arrays, ImageFolder, ParquetFiles, Records, Selection, read_group
from penstock.store.source import FileBacked, Numeric


class OfOnesOwn:
    """Samples of four bytes, their number, and labels as they are given."""

    def __init__(self, samples: int, labels: Any = None, classes: tuple[str, ...] = ()) -> None:
        self.sizes_bytes = np.full(samples, 4)
        self.labels = np.arange(samples) % 3 if labels is None else labels
        self.classes = classes

    def __len__(self) -> int:
        return self.sizes_bytes.size

    def read(self, sample: int) -> bytes:
        return np.int32(sample).tobytes()

    def read_into(self, sample: int, buffer: memoryview) -> int:
        buffer[:4] = self.read(sample)
        return 4

    def describe(self, sample: int) -> str:
        return f"own {sample}"


class TestSelect:
    def test_samples_are_numbered_in_the_order_of_the_ids(self) -> None:
        chosen = Selection(OfOnesOwn(10), [7, 2, 2])

        assert [chosen.read(sample) for sample in range(3)] == [
            OfOnesOwn(10).read(each) for each in (7, 2, 2)
        ]
        assert [chosen.describe(sample) for sample in range(3)] == ["own 7", "own 2", "own 2"]
        assert np.asarray(chosen.labels).tolist() == [1, 2, 2]

    @for_each("ids", [[1, 4], (1, 4), range(1, 5, 3), np.array([1, 4], np.uint8), {1: 0, 4: 0}])
    def test_ids_are_any_integers(self, ids: Any) -> None:
        assert Selection(OfOnesOwn(5), ids).ids.tolist() == [1, 4]

    def test_a_bool_for_each_sample_chooses_too(self) -> None:
        assert Selection(OfOnesOwn(4), [True, False, False, True]).ids.tolist() == [0, 3]

    def test_classes_are_chosen_by_name_or_number(self) -> None:
        source = Selection(OfOnesOwn(7, classes=("cat", "dog", "elk")))

        assert source.select(labels=["elk", 0]).ids.tolist() == [0, 2, 3, 5, 6]
        assert source.select(range(4), labels=["cat"]).ids.tolist() == [0, 3]
        assert source.select(labels=["elk"]).classes == ("cat", "dog", "elk")

    def test_a_selection_of_a_selection_reads_from_the_source(self) -> None:
        chosen = Selection(OfOnesOwn(10), [9, 8, 7]).select([2, 0])

        assert isinstance(chosen.source, OfOnesOwn)
        assert chosen.ids.tolist() == [7, 9]

    def test_a_slice_is_taken_as_of_a_list(self) -> None:
        source = Selection(OfOnesOwn(10))

        for chosen in (slice(0, 5), slice(-3, None), slice(None, None, 4), slice(8, 20)):
            assert source.select(chosen).ids.tolist() == list(range(10))[chosen]

    def test_named_labels_stay_named(self) -> None:
        labels = {"size": np.arange(4.0), "box": np.arange(8).reshape(4, 2)}

        chosen = Selection(OfOnesOwn(4, labels), [3, 1])

        assert isinstance(chosen.labels, dict)
        assert chosen.labels["size"].tolist() == [3.0, 1.0]
        assert chosen.labels["box"].tolist() == [[6, 7], [2, 3]]

    def test_numbers_and_paths_are_those_of_the_source(self, tmp_path: Path) -> None:
        np.save(tmp_path / "rows.npy", np.arange(6).reshape(3, 2))
        numeric = Arrays(tmp_path / "rows.npy").select([2, 0])
        (tmp_path / "images" / "cat").mkdir(parents=True)
        (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"jpeg")
        files = ImageFolder(tmp_path / "images").select([0])

        protocols = (Numeric, FileBacked)
        assert [isinstance(numeric, each) for each in protocols] == [True, False]
        assert [isinstance(files, each) for each in protocols] == [False, True]
        assert files.path_of(0) == str(tmp_path / "images" / "cat" / "1.jpg")
        copy = pickle.loads(pickle.dumps(numeric))
        assert (copy.numbers, copy.ids.tolist()) == (numeric.numbers, [2, 0])

    def test_whoever_waits_is_told_the_samples_number_in_the_selection(self) -> None:
        seen: list[int] = []
        chosen, ids = Selection(OfOnesOwn(10), [9, 8, 7]), np.array([2, 0])

        failed = read_group(chosen, ids, np.zeros(8, np.uint8), np.array([0, 4, 8]), seen.append)

        assert (failed, seen) == ([], [2, 0])

    @for_each(
        ("ids", "message"),
        [
            ([], "nothing is selected"),
            ([0, 5], "ids has 5 at position 1; the source has 5 samples"),
            ([-1], "ids has -1"),
            ([0.5], "ids is float64"),
            ([[0]], "ids is int64"),
            ([True], "or 5 bools"),
            (["0"], "ids is <U1"),
            (3, "ids is int64"),
        ],
    )
    def test_other_ids_are_refused(self, ids: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            Selection(OfOnesOwn(5), ids)

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (["cow"], "labels has 'cow', which no sample has; there are 'cat', 'dog', 'elk'"),
            ([3], "labels has 3"),
            ("cat", r"give a list, such as \['cat'\]"),
        ],
    )
    def test_other_labels_are_refused(self, labels: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Selection(OfOnesOwn(5, classes=("cat", "dog", "elk"))).select(labels=labels)


class TestSplit:
    @given(
        samples=st.integers(1, 300),
        cuts=st.lists(st.integers(0, 300), max_size=3),
        seed=st.integers(0, 2**64 - 1),
        classes=st.integers(1, 9),
        stratify=st.booleans(),
    )
    def test_each_sample_is_in_one_part_and_labels_are_spread(
        self, samples: int, cuts: list[int], seed: int, classes: int, stratify: bool
    ) -> None:
        labels = np.random.default_rng(seed).integers(0, classes, samples)
        ends = sorted({*(cut % samples for cut in cuts), 0, samples})
        counts = [end - begin for begin, end in pairwise(ends)]

        parts = Selection(OfOnesOwn(samples, labels)).split(counts, seed=seed, stratify=stratify)

        assert [len(part) for part in parts] == counts
        assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(samples))
        assert all((np.diff(part.ids) > 0).all() for part in parts)
        if stratify:
            for part in parts:
                share = len(part) / samples * np.bincount(labels, minlength=classes)
                assert np.abs(np.bincount(labels[part.ids], minlength=classes) - share).max() <= len(counts)

    def test_a_seed_makes_the_same_parts_everywhere(self) -> None:
        """They are written down here: a resumed run has to find them again."""
        train, val = Selection(OfOnesOwn(20)).split([0.8, 0.2], seed=7)
        _, stratified = Selection(OfOnesOwn(20)).split([0.8, 0.2], seed=7, stratify=True)

        assert val.ids.tolist() == GOLDEN
        assert stratified.ids.tolist() == GOLDEN_STRATIFIED
        assert train.select(range(4)).ids.tolist() == [each for each in range(20) if each not in GOLDEN][:4]
        assert val.ids.tolist() != Selection(OfOnesOwn(20)).split([0.8, 0.2], seed=8)[1].ids.tolist()

    def test_thirds_are_one_in_sum(self) -> None:
        assert [len(part) for part in Selection(OfOnesOwn(100)).split([1 / 3] * 3)] == [33, 34, 33]

    def test_a_label_among_several_is_named(self) -> None:
        source = Selection(OfOnesOwn(8, {"kind": np.repeat([0, 1], 4), "size": np.arange(8.0)}))

        (half, _) = source.split([0.5, 0.5], stratify="kind")

        assert (half.ids < 4).sum() == 2
        for name, message in (
            (True, "have names: 'kind', 'size'"),
            ("colour", "no label 'colour'"),
            ("size", "float64"),
        ):
            with pytest.raises(ConfigError, match=message):
                source.split([0.5, 0.5], stratify=name)

    @for_each(
        ("shares", "message"),
        [
            ([], "one number for each part"),
            ([0.5, 0.6], "1.1 in sum"),
            ([0.9, 0], "above zero"),
            ([7, 2], "9 in sum, and the source has 10 samples"),
            ([0.99, 0.01], "0.01 of 10 samples is none"),
            (["a"], "one number for each part"),
        ],
    )
    def test_other_shares_are_refused(self, shares: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Selection(OfOnesOwn(10)).split(shares)

    def test_another_seed_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="seed is -1"):
            Selection(OfOnesOwn(10)).split([0.5, 0.5], seed=-1)


class TestInARun:
    def arguments(self) -> dict[str, Any]:
        return {"batch_size": 4, "epochs": 1, "transforms": [DecodeRaw("<i4", (1,))], "report": None}

    def test_a_loader_reads_the_selection_and_no_other_sample(self) -> None:
        train, val = Selection(OfOnesOwn(30)).split([0.8, 0.2])
        seen = []
        for part in (train, val):
            with Loader(part, **self.arguments()) as loader:
                seen.append(sorted(np.concatenate([images[:, 0] for images, _ in loader]).tolist()))

        assert seen == [train.ids.tolist(), val.ids.tolist()]

    def test_neighbours_in_the_source_are_one_read(self, tmp_path: Path) -> None:
        """Every extent of the selection is that of the sample in the source."""
        (tmp_path / "records.bin").write_bytes(np.arange(100, dtype="<i4").tobytes())
        chosen = Records(tmp_path / "records.bin", "<i4", 1).select(range(10, 90))
        found = chosen.extents(np.array([0, 79]))

        assert found is not None
        assert found[1].tolist() == [40, 356]
        with Loader(chosen, batch_size=8, epochs=1, report=None) as loader:
            assert sorted(np.concatenate([batch.copy() for batch in loader])[:, 0]) == list(range(10, 90))

    def test_what_is_decoded_together_is_reported_for_a_part_as_for_the_whole(self, tmp_path: Path) -> None:
        """Its samples lie in every tenth row group: each costs one."""
        pq.write_table(pa.table({"image": [bytes(100)] * 1000}), tmp_path / "a.parquet", row_group_size=10)
        part = ParquetFiles(tmp_path / "a.parquet", memory="10 kB").select(range(0, 1000, 10))

        with Loader(
            part, batch_size=10, epochs=1, transforms=[DecodeRaw("u1", (100,))], report=None
        ) as loader:
            (line,) = (line for line in loader.start_lines if "row groups" in line)

        assert "row groups are decoded 10.0 times over in this order" in line

    def test_another_selection_or_split_seed_is_another_run(self) -> None:
        source = Selection(OfOnesOwn(30))
        arguments = self.arguments()
        one, other = (source.split([0.5, 0.5], seed=seed)[0] for seed in (0, 1))
        with Loader(one, **arguments) as loader:
            state = loader.state_dict()
        with Loader(source.split([0.5, 0.5], seed=0)[0], **arguments) as loader:
            loader.load_state_dict(state)
        with Loader(other, **arguments) as loader, pytest.raises(ConfigError, match="names_sizes_labels"):
            loader.load_state_dict(state)

    def test_a_selection_of_everything_is_the_same_data_set(self) -> None:
        source = OfOnesOwn(5)

        assert describe_data(Selection(source)) == describe_data(source)
        assert describe_data(Selection(source, [1, 0, 2, 3, 4])) != describe_data(source)

    def test_a_selection_is_predicted(self) -> None:
        store = SharedStore(None, Curve(((1, 1e6),)), 1e-3)
        machine = Machine(store, (StorageClass("staging", 1 << 30, 2, Curve(((1, 1e9),))),), 1)
        config = LoaderConfig(
            Selection(OfOnesOwn(30), range(8)),
            batch_size=4,
            epochs=1,
            transforms=[DecodeRaw("<i4", (1,))],
            machine=machine,
        )

        assert len(predict(config, step_seconds=0.01).epochs()) == 1


GOLDEN = [1, 4, 5, 16]
GOLDEN_STRATIFIED = [5, 10, 12, 17]
