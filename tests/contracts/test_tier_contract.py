"""What every tier must do; a new one is added to `TIERS` and has all of these tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import ClosedError, ConfigError
from penstock.store import MemoryTier, SizedTier

TIERS = [MemoryTier]

Build = Callable[[int], SizedTier]


def ids_of(*samples: int) -> NDArray[np.int64]:
    return np.array(samples, np.int64)


def fill(tier: SizedTier, begins: NDArray[np.int64], contents: list[bytes]) -> None:
    for begin, content in zip(begins.tolist(), contents, strict=False):
        tier.array[begin : begin + len(content)] = np.frombuffer(content, np.uint8)


@pytest.fixture(params=TIERS, ids=lambda tier: tier.__name__)
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    made: list[SizedTier] = []

    def build_tier(capacity_bytes: int) -> SizedTier:
        made.append(request.param(capacity_bytes))
        return made[-1]

    yield build_tier
    for tier in made:
        tier.close()


class TestTierContract:
    def test_what_was_put_is_seen_again(self, build: Build) -> None:
        tier = build(100)

        assert tier.put(7, b"seven")
        assert tier.put(9, bytearray(b"nine!!"))

        assert tier.contains(7)
        assert bytes(tier.view(7)) == b"seven"
        assert bytes(tier.view(9)) == b"nine!!"
        assert tier.used_bytes == 11
        assert tier.capacity_bytes == 100

    def test_a_copy_is_kept(self, build: Build) -> None:
        tier, data = build(100), bytearray(b"before")
        tier.put(1, data)

        data[:] = b"after!"

        assert bytes(tier.view(1)) == b"before"

    def test_any_contiguous_memory_can_be_put(self, build: Build) -> None:
        tier = build(100)

        tier.put(1, np.array([1, 2], np.int32).data)

        assert np.frombuffer(tier.view(1), np.int32).tolist() == [1, 2]

    def test_a_view_cannot_be_written_to(self, build: Build) -> None:
        tier = build(100)
        tier.put(1, b"data")

        with pytest.raises(TypeError):
            tier.view(1)[0] = 0

    def test_what_was_not_put_is_not_there(self, build: Build) -> None:
        tier = build(100)

        assert not tier.contains(1)
        with pytest.raises(KeyError):
            tier.view(1)

    def test_a_sample_that_does_not_fit_is_not_kept_and_takes_no_space(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"12345678")

        assert not tier.put(2, b"123")
        assert not tier.contains(2)
        assert tier.used_bytes == 8
        assert tier.put(3, b"12")
        assert tier.used_bytes == 10

    def test_a_sample_put_twice_takes_space_once(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"12345678")

        assert tier.put(1, b"12345678")
        assert tier.used_bytes == 8

    def test_a_sample_without_bytes_can_be_kept(self, build: Build) -> None:
        tier = build(10)

        assert tier.put(1, b"")
        assert bytes(tier.view(1)) == b""

    def test_a_capacity_below_one_byte_is_refused(self, build: Build) -> None:
        for capacity_bytes in (0, -5):
            with pytest.raises(ConfigError, match=f"capacity_bytes is {capacity_bytes}"):
                build(capacity_bytes)

    def test_closing_twice_is_harmless_and_use_after_it_an_error(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"data")
        tier.close()
        tier.close()

        assert not tier.contains(1)
        assert tier.used_bytes == 0
        with pytest.raises(ClosedError):
            tier.put(2, b"data")
        with pytest.raises(ClosedError):
            tier.view(1)

    def test_a_view_outlives_the_tier(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"data")
        view = tier.view(1)

        tier.close()

        assert bytes(view) == b"data"

    def test_threads_put_different_samples_at_once(self, build: Build) -> None:
        contents = {sample: bytes([sample % 251]) * (1000 + sample) for sample in range(400)}
        tier = build(sum(map(len, contents.values())))

        with ThreadPoolExecutor(8) as pool:
            kept = list(pool.map(lambda sample: tier.put(sample, contents[sample]), contents))

        assert all(kept)
        assert {sample: bytes(tier.view(sample)) for sample in contents} == contents
        assert tier.used_bytes == tier.capacity_bytes

    def test_threads_that_put_the_same_sample_take_its_space_once(self, build: Build) -> None:
        tier, together = build(10**7), threading.Barrier(8)

        def put() -> bool:
            together.wait()
            return tier.put(1, b"x" * 10**6)

        with ThreadPoolExecutor(8) as pool:
            kept = [pool.submit(put) for _ in range(8)]

        assert all(future.result() for future in kept)
        assert tier.used_bytes == 10**6

    def test_a_sample_is_never_seen_before_it_is_whole(self, build: Build) -> None:
        size, samples = 2_000_000, range(30)
        tier, done = build(size * len(samples)), threading.Event()
        torn: list[int] = []

        def look() -> None:
            while not done.is_set():
                torn.extend(s for s in samples if tier.contains(s) and bytes(tier.view(s)[-1:]) != b"\x07")

        with ThreadPoolExecutor(2) as pool:
            looking = pool.submit(look)
            for sample in samples:
                tier.put(sample, b"\x07" * size)
            done.set()
            looking.result()

        assert torn == []

    def test_a_group_arrives_in_the_tiers_memory_and_is_found_once_it_is_kept(self, build: Build) -> None:
        tier = build(100)
        begins = tier.take_space(ids_of(7, 2, 90_000), ids_of(5, 0, 3))
        assert begins is not None
        fill(tier, begins, [b"seven", b"", b"far"])

        assert not tier.contains(7)
        assert tier.places_of(ids_of(7, 2)).tolist() == [[-1, -1], [-1, -1]]
        assert tier.used_bytes == 8
        tier.keep(ids_of(7, 2))

        assert bytes(tier.view(7)) == b"seven"
        found = tier.places_of(ids_of(90_000, 7, 5, -3, 2, 10**12, 7))
        seven = [begins[0], begins[1]]
        assert found.tolist() == [
            [-1, -1],
            seven,
            [-1, -1],
            [-1, -1],
            [begins[1], begins[1]],
            [-1, -1],
            seven,
        ]

    def test_a_group_of_which_one_is_here_or_arrives_or_is_there_twice_gets_no_space(
        self, build: Build
    ) -> None:
        tier = build(100)
        tier.put(1, b"here")
        tier.take_space(ids_of(2), ids_of(5))

        for ids in (ids_of(3, 1), ids_of(2, 3), ids_of(3, 3)):
            assert tier.take_space(ids, ids_of(1, 1)) is None

        assert tier.used_bytes == 9
        assert tier.take_space(ids_of(3), ids_of(1)) is not None

    def test_a_group_that_does_not_fit_gets_no_space_at_all(self, build: Build) -> None:
        tier = build(10)

        assert tier.take_space(ids_of(1, 2, 3), ids_of(4, 4, 4)) is None

        assert tier.used_bytes == 0
        assert tier.take_space(ids_of(1, 2), ids_of(4, 6)) is not None

    def test_space_of_what_did_not_arrive_is_given_back(self, build: Build) -> None:
        tier = build(10)
        tier.take_space(ids_of(1, 2), ids_of(4, 6))

        tier.drop(ids_of(1))
        tier.keep(ids_of(2))

        assert tier.used_bytes == 6
        assert not tier.contains(1)
        assert tier.put(1, b"1234")
        assert not tier.put(3, b"1")

    def test_only_what_has_space_can_be_kept_or_dropped(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"one")
        tier.take_space(ids_of(2), ids_of(3))

        for call in (tier.keep, tier.drop):
            for sample in (1, 3, -1, 10**12):
                with pytest.raises(KeyError, match=f"no space was taken for sample {sample}"):
                    call(ids_of(2, sample))

        assert not tier.contains(2)
        with pytest.raises(IndexError, match="no sample -4"):
            tier.take_space(ids_of(5, -4), ids_of(1, 1))
        with pytest.raises(IndexError, match="no sample -4"):
            tier.put(-4, b"")

    def test_a_closed_tier_takes_no_groups_and_has_none(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"data")
        tier.take_space(ids_of(2), ids_of(3))
        tier.close()

        for call in (
            lambda: tier.take_space(ids_of(4), ids_of(1)),
            lambda: tier.keep(ids_of(2)),
            lambda: tier.drop(ids_of(2)),
            lambda: tier.array,
        ):
            with pytest.raises(ClosedError):
                call()
        assert tier.places_of(ids_of(1, 2)).tolist() == [[-1, -1], [-1, -1]]

    def test_groups_of_many_threads_are_found_whole(self, build: Build) -> None:
        groups, size = [np.arange(16) * 40 + first for first in range(40)], 1000
        tier, done = build(size * 16 * 40), threading.Event()
        torn: list[int] = []

        def look() -> None:
            ids = np.arange(16 * 40)
            while not done.is_set():
                for sample, (begin, end) in enumerate(tier.places_of(ids).tolist()):
                    if begin >= 0 and (tier.array[begin:end] != sample % 251 + 1).any():
                        torn.append(sample)

        def take(ids: NDArray[np.int64]) -> bool:
            begins = tier.take_space(ids, np.full(16, size))
            if begins is None:
                return False
            fill(tier, begins, [bytes([sample % 251 + 1]) * size for sample in ids.tolist()])
            tier.keep(ids)
            return True

        with ThreadPoolExecutor(5) as pool:
            looking = pool.submit(look)
            kept = sum(pool.map(take, groups + groups))
            done.set()
            looking.result()

        assert (kept, torn) == (40, [])
        assert tier.used_bytes == tier.capacity_bytes

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(st.data(), st.integers(1, 120))
    def test_groups_behave_like_a_dictionary_of_bounded_size(
        self, build: Build, data: st.DataObject, capacity_bytes: int
    ) -> None:
        """No two samples ever share a byte, whatever was dropped before."""
        tier, kept, arriving = build(capacity_bytes), dict[int, bytes](), dict[int, bytes]()
        for step in range(data.draw(st.integers(0, 12))):
            ids = data.draw(st.lists(st.integers(0, 12), max_size=5))
            contents = [bytes([step]) * data.draw(st.integers(0, 30)) for _ in ids]
            begins = tier.take_space(np.array(ids, np.int64), np.array([len(c) for c in contents], np.int64))
            if begins is None:
                total = tier.used_bytes + sum(map(len, contents))
                is_new = len({*ids}) == len(ids) and not {*ids} & {*kept, *arriving}
                # What is free may lie in pieces.
                assert not is_new or total > capacity_bytes or len(kept) + len(arriving) > 0
            else:
                fill(tier, begins, contents)
                arriving |= dict(zip(ids, contents, strict=True))
            ending = data.draw(st.lists(st.sampled_from(sorted(arriving)), unique=True)) if arriving else []
            if data.draw(st.booleans()):
                tier.keep(np.array(ending, np.int64))
                kept |= {sample: arriving[sample] for sample in ending}
            else:
                tier.drop(np.array(ending, np.int64))
            arriving = {sample: content for sample, content in arriving.items() if sample not in ending}

            places = tier.places_of(np.arange(13)).tolist()
            found = {s: tier.array[b:e].tobytes() for s, (b, e) in enumerate(places) if b >= 0}
            assert found == kept
            assert tier.used_bytes == sum(map(len, [*kept.values(), *arriving.values()])) <= capacity_bytes

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(st.lists(st.tuples(st.integers(0, 8), st.binary(max_size=30)), max_size=20), st.integers(1, 120))
    def test_it_behaves_like_a_dictionary_of_bounded_size(
        self, build: Build, puts: list[tuple[int, bytes]], capacity_bytes: int
    ) -> None:
        tier, model = build(capacity_bytes), dict[int, bytes]()

        for sample, data in puts:
            fits = sample in model or sum(map(len, model.values())) + len(data) <= capacity_bytes
            assert tier.put(sample, data) == fits
            if fits:
                model.setdefault(sample, data)

        assert {sample: bytes(tier.view(sample)) for sample in range(9) if tier.contains(sample)} == model
        assert tier.used_bytes == sum(map(len, model.values()))
