"""Keyed random numbers: the published generator, and independence of how they are asked for."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from penstock.loader.draws import DRAW
from penstock.plan import random
from penstock.plan.random import derive_key, draw_uniform, draw_words, generator_for, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: int, expected: tuple[int, ...]
) -> None:
    drawn = philox4x32(np.array(counter, np.uint64)[:, None], key)

    assert tuple(drawn[:, 0].tolist()) == expected


def test_a_draw_depends_on_its_own_item_alone() -> None:
    key = derive_key(7, "test")

    together = draw_words(key, 3, [5, 2**40, 0], 6)

    for row, item in zip(together, (5, 2**40, 0), strict=True):
        np.testing.assert_array_equal(draw_words(key, 3, [item], 6)[0], row)


def test_many_draws_are_what_each_is_alone_on_both_sides_of_what_is_drawn_at_once() -> None:
    key = derive_key(7, "test")

    together = draw_words(key, 3, np.arange(20_000), 2)

    for item in (0, 8191, 8192, 16_383, 16_384, 19_999):
        np.testing.assert_array_equal(draw_words(key, 3, [item], 2)[0], together[item])


def test_compiled_draws_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    key, items = derive_key(2**64 - 1, "test"), np.array([0, 1, 2**32 - 1, 2**32, 2**63 - 1])
    asked = [
        (epoch, items[:many], count) for epoch in (0, 2**40) for many in (0, 5) for count in (1, 2, 4, 7)
    ]
    monkeypatch.setattr(random, "_draw", None)
    expected = [draw_words(key, *each) for each in asked]

    monkeypatch.setattr(random, "_draw", DRAW.wait())

    for each, words in zip(asked, expected, strict=True):
        np.testing.assert_array_equal(draw_words(key, *each), words)


def test_streams_of_other_purposes_seeds_and_epochs_differ() -> None:
    streams = [
        draw_words(derive_key(seed, purpose), epoch, np.arange(4), 2).tobytes()
        for seed in (0, 1)
        for purpose in ("order", "transform 0")
        for epoch in (0, 1)
    ]

    assert len(set(streams)) == len(streams)


def test_uniform_draws_lie_in_the_half_open_unit_interval_around_one_half() -> None:
    drawn = draw_uniform(derive_key(1, "test"), 0, np.arange(50_000), 2)

    assert drawn.dtype == np.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 / np.sqrt(12 * drawn.size)


def test_a_generator_of_an_item_repeats_and_differs_from_its_neighbours() -> None:
    key = derive_key(1, "test")

    streams = [generator_for(key, epoch, item).random(3).tolist() for epoch in (0, 1) for item in (0, 1)]

    assert generator_for(key, 0, 0).random(3).tolist() == streams[0]
    assert len({tuple(stream) for stream in streams}) == 4


def test_a_generator_is_that_of_numpys_philox_with_the_key_and_can_be_pickled_as_it_is() -> None:
    key = 2**64 - 5

    generator = generator_for(key, 3, 99)

    of_numpy = np.random.Generator(np.random.Philox(key=key, counter=[0, 3, 99, 0]))
    assert generator.random(5).tolist() == of_numpy.random(5).tolist()
    assert pickle.loads(pickle.dumps(generator)).random(3).tolist() == of_numpy.random(3).tolist()
    seed: Any = generator.bit_generator.seed_seq
    for other in (np.random.PCG64, np.random.MT19937):
        with pytest.raises(ValueError, match="no seed for others"):
            other(seed)


def test_a_seed_of_numpys_draws_what_the_same_whole_number_draws() -> None:
    assert derive_key(np.uint64(3), "order") == derive_key(3, "order")  # type: ignore[arg-type]
