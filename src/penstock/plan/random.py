"""Counter-based random numbers: a draw is a function of what it is for.

Every random decision in Penstock (an epoch's order, a crop, a flip) is drawn here and keyed by the seed
and its purpose, so that no draw depends on which thread, rank or moment asked for it.

The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC'11): ten rounds of two 32 x 32 -> 64 bit multiplications over a 128-bit counter under a 64-bit key.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import ArrayLike, NDArray

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
#: Draws that go through all rounds together: their arrays stay in the second-level cache. 50,000 draws take 3 ms of a
#: processor so, and 8 ms in one go.
_AT_ONCE = 8192

#: Draws words in place of NumPy, once there is such a function: see `use`.
_draw: Callable[[int, int, NDArray[np.uint64], NDArray[np.uint32]], object] | None = None


def use(draw: Callable[[int, int, NDArray[np.uint64], NDArray[np.uint32]], object]) -> None:
    """Draw words by another function from here on, in all of this process: compiled, and the same ones.

    draw: `draw(key, epoch, items, out)` writes for each item of uint64[n] its words, uint32[count, n].
    """
    global _draw
    _draw = draw


def derive_key(seed: int, purpose: str) -> int:
    """Return the 64-bit key of a stream of draws.

    seed: the user's seed, any non-negative integer below 2**64.
    purpose: what the draws are for, for example ``"order"`` or ``"transform 2: RandomResizedCrop"``.
        Streams of different purposes are independent of each other.
    """
    digest = blake2b(purpose.encode(), key=int(seed).to_bytes(8, "little"), digest_size=8, person=b"penstock")
    return int.from_bytes(digest.digest(), "little")


def philox4x32(counter: NDArray[np.uint64], key: int) -> NDArray[np.uint32]:
    """Encrypt counters with Philox4x32-10.

    counter: uint64[4, n], four 32-bit words per draw, each below 2**32.
    key: 64 bits.
    Returns: uint32[4, n], four independent words per draw.
    """
    out = np.empty(counter.shape, np.uint32)
    for begin in range(0, counter.shape[1], _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        # Rows of a copy, which the rounds change in place.
        word_0, word_1, word_2, word_3 = counter[:, some].copy()
        key_0, key_1 = key & 0xFFFFFFFF, key >> 32
        for _ in range(_ROUNDS):
            word_0 *= _MULTIPLIER_0
            word_2 *= _MULTIPLIER_1
            word_1 ^= np.uint64(key_0)
            word_1 ^= word_2 >> _HALF
            word_3 ^= np.uint64(key_1)
            word_3 ^= word_0 >> _HALF
            word_2 &= _LOW
            word_0 &= _LOW
            word_0, word_1, word_2, word_3 = word_1, word_2, word_3, word_0
            key_0 = (key_0 + _WEYL_0) & 0xFFFFFFFF
            key_1 = (key_1 + _WEYL_1) & 0xFFFFFFFF
        for row, word in zip(out[:, some], (word_0, word_1, word_2, word_3), strict=True):
            row[:] = word
    return out


def draw_words(key: int, epoch: int, items: ArrayLike, count: int) -> NDArray[np.uint32]:
    """Draw uniform 32-bit words for each item of an epoch.

    key: of `derive_key`.
    items: int64[n], sample ids or positions, each in [0, 2**64).
    count: words per item.
    Returns: uint32[n, count], its columns contiguous. Row i depends on key, epoch and items[i] alone.
    """
    ids = np.asarray(items).astype(np.uint64, copy=False).ravel()
    if _draw is not None:
        out = np.empty((count, ids.size), np.uint32)
        _draw(key, epoch & 0xFFFFFFFF, ids, out)
        return out.T
    blocks = -(-count // 4)
    counter = np.empty((4, blocks, ids.size), np.uint64)
    counter[0] = ids & _LOW
    counter[1] = ids >> _HALF
    counter[2] = np.uint64(epoch & 0xFFFFFFFF)
    counter[3] = np.arange(blocks, dtype=np.uint64)[:, None]
    words = philox4x32(counter.reshape(4, -1), key).reshape(4, blocks, ids.size)
    return words.transpose(1, 0, 2).reshape(blocks * 4, ids.size)[:count].T


def draw_uniform(key: int, epoch: int, items: ArrayLike, count: int) -> NDArray[np.float64]:
    """Draw uniform numbers in [0, 1) with 32 bits of resolution, those of an item in a row.

    Returns: float64[n, count], contiguous.
    """
    return np.multiply(draw_words(key, epoch, items, count), 2.0**-32, dtype=np.float64, order="C")


def generator_for(key: int, epoch: int, item: int) -> np.random.Generator:
    """Return a NumPy generator that belongs to one item of one epoch.

    Its stream depends on key, epoch and item alone, so that a user's own transform draws the same numbers
    on any thread, rank or resumed run.
    """
    seed: Any = _Key(key)  # of which NumPy's stubs know no kind but its own
    return np.random.Generator(np.random.Philox(seed, counter=np.array([0, epoch, item, 0], np.uint64)))


class _Key(ISeedSequence):
    """A key of Philox in the place of a seed: for `Philox(key=)` NumPy asks the system for a seed, and drops it.

    Measured: 5 us for a generator, where that takes 21.
    """

    def __init__(self, key: int) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return uint64[2], the key. Raises: ValueError for all that no Philox asks for."""
        if n_words != 2 or np.dtype(dtype) != np.uint64:
            raise ValueError(
                "an item's generator has no seed for others: draw one from it, by `integers(2**63)`"
            )
        return np.array([self._key, 0], np.uint64)
