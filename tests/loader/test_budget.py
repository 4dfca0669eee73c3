"""Sharing out a memory limit."""

import re
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.loader.budget import share_memory
from penstock.loader.decode_servers import given_together, wanted_under_way
from penstock.policy.runnable import WriteQueue
from penstock.units import parse_bytes

sizes = st.integers(1, 10**6)


@given(
    st.integers(0, 10**9),
    sizes,
    st.integers(1, 512),
    st.integers(0, 64),
    st.integers(0, 10**6),
    st.integers(0, 10**12),
    st.integers(0, 10**9),
    st.integers(1, 64),
)
def test_the_parts_fit_into_the_limit_and_are_enough_to_run(
    limit: int,
    slot: int,
    local_batch: int,
    readers: int,
    largest: int,
    keep: int,
    picture: int,
    decoders: int,
) -> None:
    assume(limit >= 3 * slot + 2 * largest + picture)

    budget = share_memory(
        limit,
        slot_bytes=slot,
        local_batch=local_batch,
        readers=readers,
        largest_sample_bytes=largest,
        keep_bytes=keep,
        picture_bytes=(picture, 0),
        decoders=decoders,
    )

    assert budget.limit_bytes == limit
    assert budget.slots >= 3
    assert budget.undecoded_bytes >= 2 * largest
    readers_bytes, own_bytes = budget.read_bytes(decoders)
    assert readers_bytes >= 1.5 * largest
    assert readers_bytes + decoders * own_bytes == budget.undecoded_bytes
    assert 0 <= budget.tier_bytes <= keep
    others = budget.undecoded_bytes + budget.tier_bytes + budget.decoding_bytes
    assert budget.slots * slot + others <= limit
    assert budget.staging_bytes >= budget.slots * slot


@given(st.integers(1, 10**6), sizes)
def test_a_limit_that_cannot_hold_the_least_is_refused_with_what_it_takes(slot: int, largest: int) -> None:
    with pytest.raises(ConfigError, match="3 batch slots"):
        share_memory(
            3 * slot + 2 * largest - 1,
            slot_bytes=slot,
            local_batch=1,
            readers=1,
            largest_sample_bytes=largest,
            keep_bytes=0,
        )


def test_a_limit_that_reads_as_what_is_needed_says_how_many_bytes_are_missing() -> None:
    for limit_bytes, need in ((314_999, "need 315 kB, 1 byte more: give"), (250_000, "need 315 kB: give")):
        with pytest.raises(ConfigError, match=need):
            share_memory(
                limit_bytes,
                slot_bytes=100_000,
                local_batch=8,
                readers=4,
                largest_sample_bytes=7500,
                keep_bytes=0,
            )


@pytest.mark.parametrize(
    ("most_bytes", "queued", "asked"), [(10**6, "150 kB", "2.71 MB"), (1000, "1 kB", "2.55 MB")]
)
def test_too_little_beside_a_disk_is_refused_with_what_was_given_and_an_amount_that_works(
    most_bytes: int, queued: str, asked: str
) -> None:
    """A sixteenth is for samples that wait to be written, at most so much."""
    queue = WriteQueue(1 / 16, most_bytes)
    share = partial(
        share_memory,
        slot_bytes=800_000,
        local_batch=8,
        readers=4,
        largest_sample_bytes=70_000,
        keep_bytes=10**9,
        queue=queue,
    )

    with pytest.raises(ConfigError) as refused:
        share(2_400_000)
    assert re.fullmatch(
        rf"memory is 2\.4 MB, of which {queued} are for samples that wait to be written to disk; 3 batch slots of 800 "
        rf"kB, two samples of up to 70 kB in passing need 2\.54 MB of the rest: give {asked}, or make the batch "
        "smaller",
        str(refused.value),
    )
    budget = share(parse_bytes(asked))
    parts = budget.slots * budget.slot_bytes + budget.undecoded_bytes + budget.tier_bytes
    assert budget.queued_bytes == queue.bytes_of(budget.limit_bytes)
    assert parts + budget.queued_bytes <= budget.limit_bytes == parse_bytes(asked)
    with pytest.raises(
        ConfigError, match="bytes more, or make" if most_bytes > 1000 else "give 2.55 MB, or make"
    ):
        share(queue.limit_for(2_540_000) - 2)


def test_decoding_gets_enough_for_all_threads_or_at_least_for_one() -> None:
    def decoding(limit: int, picture: int, large: int = 0) -> int:
        return share_memory(
            limit,
            slot_bytes=1000,
            local_batch=1,
            readers=1,
            largest_sample_bytes=10,
            keep_bytes=10**12,
            picture_bytes=(picture, large),
            decoders=4,
        ).decoding_bytes

    assert decoding(10**6, 50_000) == 4 * 50_000
    assert decoding(10**6, 100_000) == 10**6 // 4
    assert decoding(10**6, 900_000) == 900_000
    assert decoding(10**6, 10_000, large=50_000) == 4 * 50_000
    assert decoding(10**6, 10_000, large=10**9) == 10**6 - 3 * 1000 - 2 * 10, "a guess refuses nothing"
    assert decoding(10**6, 0) == 0
    with pytest.raises(ConfigError, match=r"a picture of 999 kB while it is decoded need 1\.01 MB"):
        decoding(10**6, 999_000)


def test_small_batches_get_enough_slots_to_keep_all_readers_busy() -> None:
    budget = share_memory(
        10**9, slot_bytes=1000, local_batch=1, readers=32, largest_sample_bytes=1000, keep_bytes=10**6
    )

    assert budget.slots >= 2 * 32
    assert budget.tier_bytes == 10**6


@pytest.mark.parametrize(("servers", "slots"), [(0, 8), (2, 15), (8, 39)])
def test_decode_servers_get_slots_for_the_largest_groups(servers: int, slots: int) -> None:
    budget = share_memory(
        10**9,
        slot_bytes=10**6,
        local_batch=32,
        readers=32,
        largest_sample_bytes=10**5,
        keep_bytes=0,
        under_way=wanted_under_way(servers),
    )

    assert budget.slots == slots
    assert given_together(budget.slots * 32, servers, 150_528) == (16 if servers else 0)


def test_slots_that_are_asked_for_are_so_many_or_refused() -> None:
    share = partial(
        share_memory, 10**6, slot_bytes=1000, local_batch=1, readers=1, largest_sample_bytes=10, keep_bytes=0
    )

    assert [share(most_slots=most).slots for most in (1, 2, 50)] == [1, 2, 50]
    with pytest.raises(ConfigError, match="2000 batch slots for prefetch= take 2 MB"):
        share(most_slots=2000)
