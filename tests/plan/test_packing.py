"""Documents packed into rows, against best fit in plain Python."""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import Packing, packing


def filled_plainly(pieces: list[int], tokens: int) -> list[int]:
    """Return how full the rows are that best-fit decreasing makes."""
    spaces: list[int] = []
    for piece in sorted(pieces, reverse=True):
        place = bisect_left(spaces, piece)
        insort(spaces, (spaces.pop(place) if place < len(spaces) else tokens) - piece)
    return sorted(tokens - space for space in spaces)


def rows_of(packed: Packing) -> list[list[tuple[int, int, int]]]:
    return [
        list(zip(*(part.tolist() for part in packed.row(row)), strict=True)) for row in range(len(packed))
    ]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    st.integers(1, 33),
    st.sampled_from(["split", "truncate"]),
)
def test_rows_are_as_full_as_those_of_plain_best_fit_and_have_every_token_once(
    lengths: list[int], tokens: int, too_long: Any
) -> None:
    packed = Packing(lengths, tokens, too_long=too_long, seed=3)
    rows = rows_of(packed)

    pieces = [
        (document, begin, min(tokens, length - begin))
        for document, length in enumerate(lengths)
        for begin in range(0, length if too_long == "split" else min(length, tokens), tokens)
    ]
    assert sorted(piece for row in rows for piece in row) == pieces
    fills = sorted(sum(length for _, _, length in row) for row in rows)
    assert fills == filled_plainly([length for _, _, length in pieces], tokens)
    assert packed.padding_share == pytest.approx(1 - sum(fills) / (len(rows) * tokens))
    assert rows_of(pickle.loads(pickle.dumps(packed))) == rows


def test_pools_are_packed_by_themselves_and_hold_every_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_POOL", 100)
    lengths = np.random.default_rng(0).integers(1, 60, 950)
    packed = Packing(lengths, 64, too_long="error")

    documents = np.concatenate([packed.row(row).documents for row in range(len(packed))])
    assert np.bincount(documents).tolist() == [1] * 950
    assert max(packed.row(row).lengths.sum() for row in range(len(packed))) <= 64
    assert packed.padding_share < 0.1


def test_neighbours_do_not_stay_together_and_a_seed_gives_the_same_rows_under_later_versions() -> None:
    """Golden: a run that resumes must go on with the same rows."""
    lengths = np.arange(50_000) % 997 + 1
    one, other = Packing(lengths, 1024, too_long="split", seed=1), Packing(lengths, 1024, too_long="split")
    digest = xxhash.xxh3_64()
    for row in range(len(other)):
        digest.update(other.row(row).documents.tobytes())

    assert rows_of(one)[:50] != rows_of(other)[:50]
    assert digest.hexdigest() == "f32e0d66d287a93f"


@for_each(
    ("lengths", "arguments", "message"),
    [
        ([3, 19, 4], {}, "document 1 has 19 tokens, and a row 8: give longer rows, or too_long="),
        ([3, -1], {}, r"lengths has -1 for document 1"),
        ([3.5], {}, r"lengths is float64 of shape \(1,\)"),
        ([], {}, r"lengths is float64 of shape \(0,\)"),
        ([0, 0], {}, "lengths are all 0"),
        ([3], {"tokens": 0}, "tokens is 0; a row has 1 to"),
        ([3], {"too_long": "drop"}, "too_long is 'drop'"),
        ([3], {"seed": -1}, "seed is -1"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(
    lengths: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Packing(lengths, **{"tokens": 8, "too_long": "error", **arguments})
