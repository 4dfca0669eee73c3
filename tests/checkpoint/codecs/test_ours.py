"""Penstock's own codec gives back every bit, whatever the type, the values and what they are a difference to."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.checkpoint.codecs import ours
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Kind, Pair
from penstock.checkpoint.dtypes import DTYPES, DType
from penstock.checkpoint.tensors import Bytes

CODERS = {codec.name: codec.coder(lambda: iter(())) for codec in ours.CODECS}


def there_and_back(name: str, values: Bytes, dtype: DType, reference: Bytes | None) -> tuple[Kind, int]:
    """Encode and decode; return the kind and the length. Fails if a bit differs."""
    out = np.empty(values.size + SLACK_BYTES, np.uint8)
    kind, length = CODERS[name].encode(Pair(values, dtype, reference), out)
    assert 0 <= length <= values.size
    got = np.full(values.size, 0x55, np.uint8)
    if kind is Kind.STORED:
        got[:] = out[:length]
    elif kind is Kind.EQUAL:
        assert reference is not None
        got[:] = reference
    else:
        ours.DECODERS[kind](out[:length].copy(), dtype, reference, got)
    np.testing.assert_array_equal(got, values)
    return kind, length


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("count", [1, 2, 3, 4095, 4097, 20001])
def test_every_type_and_size_comes_back_bit_for_bit(name: str, dtype: DType, count: int) -> None:
    rng = np.random.default_rng(count)
    reference = rng.integers(0, 256, count * dtype.item_bytes).astype(np.uint8)
    values = reference.copy()
    values[:: 7 * dtype.item_bytes] += 1
    there_and_back(name, values, dtype, reference)
    there_and_back(name, values, dtype, None)
    there_and_back(name, np.zeros_like(values), dtype, reference)
    assert there_and_back(name, values, dtype, values.copy()) == (Kind.EQUAL, 0)
