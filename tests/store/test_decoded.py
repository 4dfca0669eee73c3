"""What is decoded as a whole is decoded once for all who want it, and never takes more memory than it was given."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.store.decoded import DecodedUnits, Turns


def content_of(unit: int, size: int = 10) -> NDArray[np.uint8]:
    return np.full(size, unit, np.uint8)


def units_of(count: int, capacity_bytes: int) -> DecodedUnits:
    return DecodedUnits(np.full(count, 10), capacity_bytes)


def test_threads_that_want_one_unit_have_it_decoded_once() -> None:
    units, decoded = units_of(1, 10), list[int]()
    has_begun, may_end = threading.Event(), threading.Event()

    def decode(unit: int) -> NDArray[np.uint8]:
        decoded.append(unit)
        has_begun.set()
        may_end.wait()
        return content_of(unit)

    def read(_: int) -> int:
        with units.lent(0, decode) as content:
            return int(content.sum())

    with ThreadPoolExecutor(4) as pool:
        found = pool.map(read, range(4))
        has_begun.wait()
        may_end.set()

        assert list(found) == [0] * 4
    assert decoded == [0]


def test_units_never_take_more_than_the_memory_whatever_threads_want() -> None:
    units, most, lock = units_of(12, 35), [0], threading.Lock()
    held: dict[int, int] = {}

    def decode(unit: int) -> NDArray[np.uint8]:
        with lock:
            most[0] = max(most[0], units._used_bytes, sum(count > 0 for count in held.values()) * 10)
        return content_of(unit)

    def read(seed: int) -> None:
        for unit in np.random.default_rng(seed).integers(0, 12, 300).tolist():
            if unit % 3:
                with units.lent(unit, decode) as content:
                    with lock:
                        held[unit] = held.get(unit, 0) + 1
                    assert (content == unit).all()
                    with lock:
                        held[unit] -= 1
            else:
                with units.present([unit, unit + 1]) as contents:
                    assert all((content == there).all() for there, content in contents.items())

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))

    assert most[0] <= 35
    assert units._used_bytes == 10 * len(units._units) <= 35
    assert not any(entry.users for entry in units._units.values())


def test_no_more_units_are_decoded_at_the_same_time_than_allowed() -> None:
    units, begun = DecodedUnits(np.full(3, 10), 1000, at_once=2), list[int]()
    two_have, third_is_somewhere, may_end = threading.Event(), threading.Event(), threading.Event()

    class Noted(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            third_is_somewhere.set()
            return super().wait(timeout)

    units._changed = Noted()

    def decode(unit: int) -> NDArray[np.uint8]:
        begun.append(unit)
        if len(begun) > 1:
            (third_is_somewhere if len(begun) > 2 else two_have).set()
        may_end.wait()
        if unit == 1:
            raise DataError("unit 1 is damaged")
        return content_of(unit)

    def read(unit: int) -> bool:
        try:
            with units.lent(unit, decode) as content:
                return bool((content == unit).all())
        except DataError:
            return unit == 1

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(read, unit) for unit in range(2)]
        two_have.wait()
        found.append(pool.submit(read, 2))
        third_is_somewhere.wait()
        begun_before = len(begun)
        may_end.set()

        assert all(each.result() for each in found)
    assert begun_before == 2
    assert len(begun) == 3
    assert units._decoding == 0


def test_what_was_lent_is_not_kept_by_the_borrower() -> None:
    units = units_of(3, 20)
    with units.lent(0, content_of):
        pass

    with units.present([0, 1]) as contents:
        assert list(contents) == [0]

    assert not contents
    with units.lent(1, content_of), units.present([0, 1, 1, 2]) as contents:
        assert sorted(contents) == [0, 1]


def test_a_thread_waits_until_what_others_read_is_given_back() -> None:
    units, other_has_it = units_of(2, 10), threading.Event()

    def read() -> None:
        with units.lent(1, content_of):
            other_has_it.set()

    with units.lent(0, content_of):
        thread = threading.Thread(target=read)
        thread.start()
        assert 1 not in units
        assert not other_has_it.is_set()
    thread.join()

    assert other_has_it.is_set()
    assert 0 not in units


def test_a_unit_that_cannot_be_decoded_is_tried_again_by_the_next() -> None:
    units = units_of(2, 10)

    def fail(unit: int) -> NDArray[np.uint8]:
        raise DataError(f"unit {unit} is damaged")

    for _ in range(2):
        with pytest.raises(DataError, match="unit 1 is damaged"), units.lent(1, fail):
            pass
    with units.lent(1, content_of) as content:
        assert (content == 1).all()
    with units.lent(0, content_of):
        assert 1 not in units


def test_a_copy_begins_empty() -> None:
    units = units_of(2, 20)
    with units.lent(1, content_of):
        copy = pickle.loads(pickle.dumps(units))

    assert 1 in units
    assert 1 not in copy
    units.close()
    assert 1 not in units


def test_as_much_is_decoded_at_once_as_fits_and_what_is_larger_by_itself() -> None:
    turns = Turns(100)

    assert turns.fits(1000)
    with turns.of(60):
        assert turns.fits(40)
        assert not turns.fits(41)
        with turns.of(40):
            assert not turns.fits(1)
        assert turns.fits(40)
    with turns.of(1000):
        assert not turns.fits(1)
    assert turns.fits(1000)
