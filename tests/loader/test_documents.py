"""Rows of packed documents, as a loader gives them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, DataError
from penstock.loader import Loader, PackedDocuments, cu_seqlens

LENGTHS = np.random.default_rng(0).integers(1, 90, 120)


class Documents:
    """Token t of document d is 1000 * d + t."""

    def __len__(self) -> int:
        return LENGTHS.size

    def __getitem__(self, index: int) -> Any:
        return 1000 * index + np.arange(LENGTHS[index])


class AsHuggingFace(Documents):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": super().__getitem__(index).tolist(), "text": "..."}

    def __getitems__(self, samples: list[int]) -> list[Any]:
        return [self[sample] for sample in samples]


def packed(documents: Any = None, **arguments: Any) -> PackedDocuments:
    settings: dict[str, Any] = {"tokens": 64, "too_long": "split", "pad": -7, **arguments}
    return PackedDocuments(documents or Documents(), LENGTHS, **settings)


def batches_of(dataset: Any, **arguments: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 1, "report": None, **arguments}
    with Loader(dataset, **settings) as loader:
        return [{name: array.copy() for name, array in batch.items()} for batch in loader]


@pytest.mark.parametrize("kind", [pytest.param(Documents, marks=pytest.mark.slow), AsHuggingFace])
def test_every_token_comes_once_and_positions_begin_with_each_document(kind: Any) -> None:
    found = []
    for batch in batches_of(packed(kind())):
        for ids, labels, positions, numbers in zip(
            *(batch[name] for name in ("input_ids", "labels", "position_ids", "document_ids")), strict=True
        ):
            is_padding = numbers < 0
            assert (ids[is_padding] == -7).all()
            assert (labels == np.where(is_padding, -100, ids)).all()
            for number in range(numbers.max() + 1):
                tokens = ids[numbers == number]
                assert positions[numbers == number].tolist() == list(range(tokens.size))
                assert np.unique(tokens // 1000).size == 1
                found += tokens.tolist()
            assert positions[is_padding].tolist() == list(range(is_padding.sum()))
    assert sorted(found) == [1000 * d + t for d, length in enumerate(LENGTHS.tolist()) for t in range(length)]


def test_sequence_bounds_are_those_between_documents() -> None:
    (batch, *_) = batches_of(packed())
    bounds, longest = cu_seqlens(torch.from_numpy(batch["position_ids"]))

    numbers = batch["document_ids"] + 1000 * np.arange(4)[:, None]
    expected = [0, *(np.flatnonzero(np.diff(numbers.ravel())) + 1).tolist(), numbers.size]
    assert bounds.dtype == np.int32
    assert bounds.tolist() == expected
    assert longest == np.diff(expected).max()


def test_a_run_goes_on_with_the_same_rows_and_not_with_others() -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "epochs": 1, "report": None}
    whole = batches_of(packed())
    with Loader(packed(), **arguments) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    rest = batches_of(packed(), state=state)
    assert [each["input_ids"].tolist() for each in rest] == [each["input_ids"].tolist() for each in whole[1:]]
    with pytest.raises(ConfigError, match=r"data\.indices was .* and is .* here"):
        Loader(packed(seed=1), state=state, **arguments)


def test_the_start_says_how_full_rows_are() -> None:
    lines: list[str] = []
    dataset = packed()
    batches_of(dataset, report=lines.append)
    share = f"{100 * dataset.packing.padding_share:.2g} % of them padding"
    assert any(f"packs 120 documents in {len(dataset)} rows of 64 tokens, {share}" in line for line in lines)


def test_documents_that_are_not_as_their_lengths_say_are_named() -> None:
    class Longer(Documents):
        def __getitem__(self, index: int) -> Any:
            return np.arange(LENGTHS[index] + (index == 17))

    with pytest.raises(DataError, match=r"Longer\[17\] is int64\[\d+\], and by its length \d+ tokens"):
        batches_of(packed(Longer()))
    with pytest.raises(
        DataError, match=r"AsHuggingFace\[\d+\] has no 'ids', but 'input_ids', 'text': give field="
    ):
        batches_of(packed(AsHuggingFace(), field="ids"))
    with pytest.raises(ConfigError, match="lengths is of 119 documents, and Documents has 120"):
        PackedDocuments(Documents(), LENGTHS[1:], tokens=64, too_long="split")

    class Drawing(Documents):
        def __getitem__(self, index: int, rng: Any) -> Any:  # type: ignore[override]
            return np.arange(LENGTHS[index])

    with pytest.raises(
        ConfigError, match=r"Drawing\.__getitem__ asks for rng, and documents are packed once"
    ):
        packed(Drawing())
