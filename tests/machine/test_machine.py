"""Rates of equations 3.5 to 3.7 with shared bandwidth, by hand, and what a machine may not be."""

import math
from typing import Any

import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass

RAM = Curve(((1, 16_550e6), (2, 21_164e6), (3, 21_186e6), (4, 21_415e6)))
SSD = Curve(((1, 192e6), (2, 399e6), (3, 599e6), (4, 637e6)))
CLIENTS = Curve(((1, 66e6), (2, 86e6), (4, 146e6), (8, 326e6)))


def machine(**changes: Any) -> Machine:
    fields: dict[str, Any] = {
        "source": SharedStore(clients=CLIENTS, read=Curve(((1, 20e6), (4, 80e6))), threads=4),
        "storage": (
            StorageClass("staging", 10**9, 2, RAM),
            StorageClass("ssd", 10**10, 2, SSD, backend="filesystem", path="/tmp/penstock"),
        ),
        "ranks": 4,
        "network_bytes_per_second": 300e6,
        "source_network_bytes_per_second": 2e9,
        "preprocess_bytes_per_second": 200e6,
        "decode_threads": 2,
    }
    return Machine(**{**fields, **changes})


def test_one_read_alone_is_limited_by_its_own_curve() -> None:
    assert machine().source_rate(clients=1, reads_in_flight=1) == 20e6


def test_reads_of_one_client_share_what_the_store_gives_that_client() -> None:
    # t(1) = 66 MB/s is below the client's own 80 MB/s at four reads.
    assert machine().source_rate(clients=1, reads_in_flight=4) == pytest.approx(66e6 / 4)


def test_clients_share_the_store() -> None:
    # t(4)/4 = 36.5 MB/s; two reads of one client get half each; its own curve would give 40 MB/s in all.
    assert machine().source_rate(clients=4, reads_in_flight=2) == pytest.approx(36.5e6 / 2)


def test_the_link_to_the_store_is_shared_too() -> None:
    narrow = machine(source_network_bytes_per_second=10e6)

    assert narrow.source_rate(clients=1, reads_in_flight=2) == 5e6


def test_without_a_curve_over_clients_they_do_not_slow_each_other() -> None:
    alone = machine(source=SharedStore(clients=None, read=Curve.flat(50e6)))

    assert alone.source_rate(clients=1000, reads_in_flight=1) == 50e6


def test_where_a_clients_own_side_never_limits_the_others_and_the_link_do() -> None:
    free = machine(source=SharedStore(clients=CLIENTS))

    # t(4)/4 = 36.5 MB/s, shared by the client's reads, however many.
    assert free.source_rate(clients=4, reads_in_flight=1) == pytest.approx(36.5e6)
    assert free.source_rate(clients=4, reads_in_flight=10) == pytest.approx(3.65e6)
    narrow = machine(source=SharedStore(clients=CLIENTS), source_network_bytes_per_second=10e6)
    assert narrow.source_rate(clients=4, reads_in_flight=2) == 5e6


def disk(**changes: Any) -> Machine:
    """A store of one disk: 10 ms of seek, 100 MB/s; at reads of 1 MB it gives 50 MB/s, whoever shares it."""
    fields: dict[str, Any] = {
        "clients": Curve.flat(50e6),
        "sequential": Curve.flat(100e6),
        "random_bytes": 10**6,
    }
    return machine(source=SharedStore(**{**fields, **changes}))


def test_a_scattered_read_of_the_measured_size_takes_what_was_measured() -> None:
    assert disk().source_seconds(1, 1e6, clients=1, sample_bytes=7) == pytest.approx(1e6 / 50e6)
    assert disk().source_seconds(1, 1e6, clients=4, sample_bytes=7) == pytest.approx(4 * 1e6 / 50e6)


def test_smaller_reads_pay_the_seek_as_well_and_larger_ones_hardly_notice_it() -> None:
    assert disk().source_request_seconds(clients=1, sample_bytes=7) == pytest.approx(0.01)
    assert disk().source_seconds(100, 100 * 1e4, clients=1, sample_bytes=7) == pytest.approx(
        100 * 0.01 + 0.01
    )
    assert disk().source_seconds(1, 1e9, clients=1, sample_bytes=7) == pytest.approx(10.01)


def test_curves_are_of_reads_as_large_as_the_samples_unless_a_size_is_given() -> None:
    unknown = disk(random_bytes=None)

    assert unknown.source_request_seconds(clients=1, sample_bytes=2e6) == pytest.approx(0.02)


def test_what_a_request_costs_the_store_is_not_shared_by_its_clients() -> None:
    # 1,000 requests a second for all of them: one of four gets through 250.
    capped = machine(source=SharedStore(clients=Curve(((1, 100e6), (4, 400e6))), request_seconds=0.001))

    assert capped.source_seconds(250, 0, clients=4, sample_bytes=1) == pytest.approx(1.0)
    assert capped.source_seconds(250, 100e6, clients=4, sample_bytes=1) == pytest.approx(2.0)


def test_without_what_tells_them_apart_scattered_and_consecutive_reads_cost_the_same() -> None:
    plain = machine(source=SharedStore(clients=CLIENTS))

    one, many = (plain.source_seconds(n, 1e9, clients=4, sample_bytes=1e5) for n in (1, 10_000))

    assert one == many == pytest.approx(1e9 / 36.5e6)


def test_latency_shows_where_the_reads_in_flight_do_not_cover_it() -> None:
    # Each of 4 reads waits 100 ms and then takes 20 ms of wire: a cycle of 120 ms brings 4 reads, not 6.
    slow = disk(latency_seconds=0.1, threads=4)

    assert slow.source_seconds(400, 400e6, clients=1, sample_bytes=1) == pytest.approx(400 * 0.12 / 4)
    assert disk(latency_seconds=0.01, threads=4).source_seconds(400, 400e6, 1, 1) == pytest.approx(8.0)


def test_writing_is_as_fast_as_reading_unless_it_was_measured() -> None:
    assert disk().source_write_rate(clients=4) == 25e6
    assert disk(write=Curve.flat(40e6)).source_write_rate(clients=4) == 10e6


def test_a_tier_is_shared_by_its_readers() -> None:
    assert machine().local_rate(tier=1, readers=2) == pytest.approx(399e6 / 2)
    assert machine().local_rate(tier=1, readers=1) == 192e6


def test_another_ranks_tier_is_limited_by_the_slower_of_tier_and_link() -> None:
    assert machine().remote_rate(tier=1, readers=1) == 192e6
    assert machine().remote_rate(tier=1, readers=2) == pytest.approx(300e6 / 2)


def test_staging_takes_as_long_as_the_slower_of_preprocessing_and_writing() -> None:
    # beta = 200 MB/s against 21,164 / 2 MB/s for each of two writers.
    assert machine().write_seconds(2_000_000) == pytest.approx(0.01)
    # w_0(2)/2 = 50 MB/s is the slower one when the staging buffer's write curve says so.
    slow = StorageClass("staging", 10**9, 2, RAM, write=Curve.flat(100e6))
    assert machine(storage=(slow,)).write_seconds(2_000_000) == pytest.approx(0.04)


def test_a_training_speed_counts_bytes_or_samples() -> None:
    assert Rate(100e6).seconds(samples=64, stored_bytes=6_400_000) == pytest.approx(0.064)
    assert Rate(640, of="samples").seconds(samples=64, stored_bytes=6_400_000) == pytest.approx(0.1)


@for_each(
    ("changes", "message"),
    [
        ({"storage": ()}, "storage is empty"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 1.5}, "ranks is 1.5; it must be an integer"),
        ({"decode_threads": 0}, "decode_threads is 0"),
        ({"processors": 0}, "processors is 0; it must be at least 1"),
        ({"processors": 1.5}, "processors is 1.5; it must be an integer"),
        ({"processors": 2.0}, "processors is 2.0; it must be an integer"),
        ({"processors": "2"}, "processors is '2'; it must be an integer"),
        ({"processors": math.nan}, "processors is nan"),
        ({"network_bytes_per_second": 0.0}, "network_bytes_per_second is 0.0"),
        ({"source_network_bytes_per_second": -1.0}, "source_network_bytes_per_second is -1.0"),
        ({"preprocess_bytes_per_second": math.nan}, "preprocess_bytes_per_second is nan"),
        (
            {"storage": (StorageClass("a", 1, 1, RAM), StorageClass("a", 1, 1, RAM))},
            r"storage\[1\].name is 'a', as storage\[0\] is",
        ),
        (
            {"storage": (StorageClass("a", 1, 1, RAM, backend="filesystem", path="/tmp"),)},
            "the staging buffer is in memory",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine(**changes)


@for_each(
    ("changes", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"latency_seconds": -1.0}, "latency_seconds is -1.0"),
        ({"latency_seconds": math.nan}, "latency_seconds is nan"),
        ({"backend": "tape"}, "backend is 'tape'; it must be one of memory, filesystem"),
        ({"backend": "filesystem"}, "path is missing"),
        ({"path": "/tmp"}, "backend 'memory' has none"),
    ],
)
def test_a_storage_class_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"name": "ram", "capacity_bytes": 10, "threads": 1, "read": RAM, **changes}

    with pytest.raises(ConfigError, match=message):
        StorageClass(**fields)


@for_each(
    "changes",
    [
        {"threads": 0},
        {"latency_seconds": math.inf},
        {"request_seconds": -1.0},
        {"request_seconds": math.nan},
        {"random_bytes": 0},
        {"random_bytes": 1.5},
    ],
)
def test_a_shared_store_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        SharedStore(clients=None, read=RAM, **changes)


def test_a_store_is_not_slower_at_consecutive_reads() -> None:
    with pytest.raises(ConfigError, match=r"sequential is 1e\+08 bytes/s at 8 clients, below the 3.26e\+08"):
        SharedStore(clients=CLIENTS, sequential=Curve(((1, 100e6), (2, 100e6), (4, 200e6), (8, 100e6))))


def test_a_shared_store_of_no_known_speed_is_refused() -> None:
    with pytest.raises(ConfigError, match="read is missing, and so is clients"):
        SharedStore(clients=None)


@for_each("per_second", [0.0, -1.0, math.nan, math.inf])
def test_a_training_speed_is_finite_and_above_zero(per_second: float) -> None:
    with pytest.raises(ConfigError, match="per_second"):
        Rate(per_second)


def test_a_training_speed_counts_nothing_else() -> None:
    with pytest.raises(ConfigError, match="'pixels'"):
        Rate(5.0, of="pixels")  # type: ignore[arg-type]


def test_more_threads_than_a_process_has_are_refused() -> None:
    most = machine(decode_threads=65_536)
    assert most.decode_threads == 65_536

    with pytest.raises(ConfigError, match="decode_threads is 65537; it must be at most 65,536"):
        machine(decode_threads=65_537)
    with pytest.raises(ConfigError, match="threads is 1000000000; it must be at most 65,536"):
        SharedStore(clients=CLIENTS, threads=1_000_000_000)
    with pytest.raises(ConfigError, match="threads is 1000000000; it must be at most 65,536"):
        StorageClass("ssd", 10**10, 1_000_000_000, SSD, backend="filesystem", path="/tmp/penstock")
