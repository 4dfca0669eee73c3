"""What every tier must do; a new one is added to `TIERS` and has all of these tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, LoaderClosed
from penstock.store import MemoryTier, SizedTier

TIERS = [MemoryTier]

Build = Callable[[int], SizedTier]


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

    def test_a_sample_that_does_not_fit_is_not_kept_and_takes_no_room(self, build: Build) -> None:
        tier = build(10)
        tier.put(1, b"12345678")

        assert not tier.put(2, b"123")
        assert not tier.contains(2)
        assert tier.used_bytes == 8
        assert tier.put(3, b"12")
        assert tier.used_bytes == 10

    def test_a_sample_put_twice_takes_room_once(self, build: Build) -> None:
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
        with pytest.raises(LoaderClosed):
            tier.put(2, b"data")
        with pytest.raises(LoaderClosed):
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

    def test_threads_that_put_the_same_sample_take_its_room_once(self, build: Build) -> None:
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
