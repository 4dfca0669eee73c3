"""Arrays of unequal length come end to end or padded, the same on any threads, and within the memory that was given."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.for_each import for_each
from tests.loader.made import Made
from tests.patience import patient
from torch.nn.utils.rnn import pad_sequence

from penstock.errors import ConfigError, DataError
from penstock.flow.work import Brought
from penstock.loader import Loader, Padding, Ragged
from penstock.loader.dataset import SampleDecoder, numpy_leaf
from penstock.loader.unequal import Joined
from penstock.plan import TokenBudget
from penstock.policy import Load
from penstock.torch import Loader as TorchLoader
from penstock.torch import to_nested

COUNT = 60
LENGTHS = np.random.default_rng(0).integers(0, 30, COUNT)
LENGTHS[:2] = 3, 0


def tokens(index: int) -> Any:
    return np.random.default_rng(index).integers(1, 1000, int(LENGTHS[index]))


def load(make: Callable[[int], Any], kind: Any = Loader, **arguments: Any) -> list[Any]:
    chosen = {"batch_size": 8, "epochs": 1, "shuffle": False, "memory": "4 MB", "report": None, **arguments}
    with kind(Made(make), **chosen) as loader:
        return list(loader)


@for_each("decoders", [0, 3])
@for_each("as_made", [lambda array: array, torch.from_numpy, np.ndarray.tolist])
def test_padded_and_ragged_fields_hold_what_pytorch_makes_of_the_same_samples(
    as_made: Callable[[Any], Any], decoders: int
) -> None:
    def make(index: int) -> dict[str, Any]:
        return {
            "id": index,
            "in": {"tokens": as_made(tokens(index))},
            "more": tokens(index),
            "text": f"no. {index}",
        }

    found = load(
        make, TorchLoader, decoders=decoders, ragged=["in.tokens"], padded={"more": Padding(-1, 8, mask=True)}
    )

    assert len(found) == 8
    for step, batch in enumerate(found):
        ids = range(8 * step, min(8 * step + 8, COUNT))
        samples = [torch.from_numpy(tokens(index)) for index in ids]
        wanted = pad_sequence(samples, batch_first=True, padding_value=-1)
        assert batch["id"].tolist() == list(ids)
        assert batch["text"] == [f"no. {index}" for index in ids]
        ragged, padded = batch["in"]["tokens"], batch["more"]
        assert torch.equal(ragged.values, torch.cat(samples))
        assert torch.equal(ragged.padded(-1), wanted)
        assert torch.equal(torch.nested.to_padded_tensor(to_nested(ragged), -1), wanted)
        longest = wanted.shape[1]
        assert padded.values.shape[1] == -(-longest // 8) * 8
        assert torch.equal(padded.values[:, :longest], wanted)
        assert (padded.values[:, longest:] == -1).all()
        assert torch.equal(padded.mask, padded.values != -1)


@given(
    arrays=st.lists(
        hnp.arrays(np.int16, st.tuples(st.integers(0, 5), st.integers(0, 4))), min_size=1, max_size=6
    ),
    multiple_of=st.sampled_from([1, 3, (2, 4)]),
)
@settings(max_examples=60, deadline=None)
def test_padding_equals_a_plain_loop_in_every_dimension(arrays: list[Any], multiple_of: Any) -> None:
    how = Padding(7, multiple_of, mask=True)
    join = Joined(arrays, "boxes", how, numpy_leaf)

    made = join.join(arrays)

    rows, columns = (multiple_of, 1) if isinstance(multiple_of, int) else multiple_of
    shape = [max(each) for each in zip(*(array.shape for array in arrays), strict=True)]
    assert made.values.shape == (len(arrays), -(-shape[0] // rows) * rows, -(-shape[1] // columns) * columns)
    for index, array in enumerate(arrays):
        for place in np.ndindex(made.values.shape[1:]):
            is_there = all(at < size for at, size in zip(place, array.shape, strict=True))
            assert made.mask[(index, *place)] == is_there
            assert made.values[(index, *place)] == (array[place] if is_there else 7)


@given(lengths=st.lists(st.integers(0, 9), max_size=8), columns=st.sampled_from([(), (3,)]))
@settings(max_examples=60, deadline=None)
def test_a_ragged_batch_gives_each_sample_back(lengths: list[int], columns: tuple[int, ...]) -> None:
    arrays = [np.random.default_rng(length).random((length, *columns)) for length in lengths]
    join = Joined([np.ones((2, *columns))], "points", None, numpy_leaf)

    made = join.join(arrays)

    assert made.offsets.dtype == np.int64
    assert made.lengths.tolist() == lengths
    assert all(np.array_equal(one, other) for one, other in zip(made, arrays, strict=True))
    longest = max(lengths, default=0)
    padded = made.padded(-1)
    assert padded.shape == (len(arrays), longest, *columns)
    for row, array in zip(padded, arrays, strict=True):
        assert np.array_equal(row[: len(array)], array)
        assert (row[len(array) :] == -1).all()


@pytest.mark.parametrize("decoders", [0, 2])
def test_samples_that_are_skipped_are_missing_from_the_batch_and_nothing_else(decoders: int) -> None:
    def make(index: int) -> dict[str, Any]:
        if index % 5 == 3:
            raise OSError("gone")
        return {"tokens": tokens(index) if index % 7 != 6 else tokens(index).astype(float), "id": index}

    found = load(make, decoders=decoders, ragged=["tokens"], on_error="skip")

    ids = [index for index in range(COUNT) if index % 5 != 3 and index % 7 != 6]
    assert np.concatenate([batch["id"] for batch in found]).tolist() == ids
    samples = [sample for batch in found for sample in batch["tokens"]]
    assert all(np.array_equal(sample, tokens(index)) for sample, index in zip(samples, ids, strict=True))


@dataclass
class Scene:
    points: Any
    boxes: Any


def test_dataclasses_empty_lists_and_batches_by_tokens_work_together() -> None:
    def make(index: int) -> Scene:
        return Scene(tokens(index), [[0.5, 1.0, 2.0, 3.0]] * (index % 3))

    budget = TokenBudget(np.maximum(LENGTHS, 1), tokens=64, seed=1)
    found = load(
        make, batch_size=None, shuffle=True, batch_sampler=budget, padded={"points": 0}, ragged=["boxes"]
    )

    assert all(batch.points.size <= 64 for batch in found)
    assert sum(len(batch.boxes) for batch in found) == COUNT
    assert all(batch.boxes.values.shape == (batch.boxes.offsets[-1], 4) for batch in found)


@for_each(
    ("arguments", "message"),
    [
        ({"ragged": ["tokns"]}, "ragged names 'tokns', and samples have 'tokens', 'id'"),
        ({"padded": {"id": 0}}, "'id' is in padded, and a sample has a int there"),
        ({"padded": {"tokens": 0.5}}, "'tokens' is in padded with 0.5, and its arrays are int64"),
        ({"padded": {"tokens": "x"}}, "padding is 'x'; it is the number"),
        ({"padded": {"tokens": 0}, "ragged": ["tokens"]}, "'tokens' is in ragged and in padded"),
        ({"padded": {"tokens": Padding(0, (8, 8))}}, "its arrays have 1 dimensions"),
        ({"ragged": ["tokens"], "collate_fn": list}, "collate_fn makes the batches"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_the_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(lambda index: {"tokens": tokens(index), "id": index}, **arguments)


def test_lengths_that_differ_without_a_word_are_an_error_that_names_both_remedies() -> None:
    with pytest.raises(DataError, match=r"padded=\{'tokens': 0\} pads.*ragged=\['tokens'\]"):
        load(lambda index: {"tokens": tokens(index)})
    with pytest.raises(DataError, match=r"is float64\[.*is int64\[any length\]: samples of a batch must be"):
        load(lambda index: {"tokens": tokens(index) * (1 if index < 20 else 1.5)}, ragged=["tokens"])


def test_fewer_batches_are_loaded_ahead_where_samples_grow_beyond_the_memory_given() -> None:
    """Large ones are made once the training has the last small ones, and it waits for 2.6 MB of them."""
    asked, has_small_ones = threading.Condition(), threading.Event()
    made = set[int]()

    def make(index: int) -> np.ndarray:
        if index >= 20:
            assert has_small_ones.wait(patient(60))
        with asked:
            made.add(index)
            asked.notify_all()
        return np.full(10 if index < 20 else 20_000, index)

    lines: list[str] = []
    options: dict[str, Any] = {"batch_size": 2, "epochs": 1, "shuffle": False, "decoders": 2, "prefetch": 8}
    with Loader(Made(make), memory="1 MB", ragged=[""], report=lines.append, **options) as loader:
        for step, batch in enumerate(loader):
            assert batch.values[batch.offsets[:-1]].tolist() == [2 * step, 2 * step + 1]
            if step == 9:
                has_small_ones.set()
                with asked:
                    assert asked.wait_for(lambda: made >= set(range(36)), 60)

    assert sum("batches are larger than the first samples let expect" in line for line in lines) == 1


def test_a_copy_of_the_decoder_in_another_process_hands_over_what_it_made() -> None:
    decoder = SampleDecoder((0, (tokens(0), "a")), str, numpy_leaf, unequal={"0": None})
    there = pickle.loads(pickle.dumps(decoder))

    # A step of three samples, of which this process has one and the other two.
    for each, rows in ((decoder, [1]), (there, [0, 2])):
        task = Load(7, 0, 0, np.arange(3), 4, rows, [0] * 3, [0] * 3, rows)
        data = [(tokens(row), f"no. {row}") for row in rows]
        brought = Brought(rows, np.array(rows), data)
        assert each.decode(task, brought, (np.zeros((3,), np.uint8),), lambda sample: None) == []
    decoder.put(4, [0, 2], pickle.loads(pickle.dumps(there.take(4, [0, 2]))))

    ragged, texts = decoder.finish(4, (), range(3))
    assert texts == ["no. 0", "no. 1", "no. 2"]
    assert [sample.tolist() for sample in ragged] == [tokens(row).tolist() for row in range(3)]
    assert decoder.beside.held_bytes == ragged.values.nbytes + ragged.offsets.nbytes
    assert there.beside.held_bytes == 0


def test_a_loader_without_samples_yet_shows_what_batches_are_made_of() -> None:
    with Loader(
        Made(lambda index: (tokens(index), tokens(index))),
        batch_size=4,
        epochs=1,
        ragged=[0],
        padded={1: 0},
        report=None,
    ) as loader:
        ragged, padded = loader.empty_batch()

    assert isinstance(ragged, Ragged)
    assert len(ragged) == 0
    assert padded.shape == (0, 0)
