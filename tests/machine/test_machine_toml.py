"""A machine's text: the thesis' listing 4.7, the way there and back, and every wrong field by its path."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Device, DeviceLink, Machine, Rate, SharedStore, StorageClass
from penstock.machine.ssd import Ssd

LISTING_4_7 = """
network = "10000 MB/s"
source_network = "2000 MB/s"
compute = "100 MB/s"
preprocess = "200 MB/s"
ranks = 4

[source]
clients = { 1 = "66 MB/s", 2 = "86 MB/s", 4 = "146 MB/s", 8 = "326 MB/s", 16 = "324 MB/s", 128 = "324 MB/s" }
read = "2000 MB/s"

[[storage]]
name = "staging"
capacity = "1024 MB"
threads = 2
read = { 1 = "16550 MB/s", 2 = "21164 MB/s", 3 = "21186 MB/s", 4 = "21415 MB/s" }

[[storage]]
name = "ram"
capacity = "2048 MB"
backend = "memory"
threads = 2
read = { 1 = "16550 MB/s", 2 = "21164 MB/s", 3 = "21186 MB/s", 4 = "21415 MB/s" }

[[storage]]
name = "disk"
capacity = "10240 MB"
backend = "filesystem"
path = "/tmp/hdmlp"
threads = 2
read = { 1 = "192 MB/s", 2 = "399 MB/s", 3 = "599 MB/s", 4 = "637 MB/s" }
write = { 1 = "100 MB/s", 4 = "300 MB/s" }
latency = "80 us"
"""

SPEEDS_OF_THE_STORE = LISTING_4_7[LISTING_4_7.index("clients") : LISTING_4_7.index("[[")]


def test_numbers_of_numpy_are_numbers() -> None:
    """As they come from np.arange, or from the size of an array."""
    two: Any = np.int64(2)
    staging = StorageClass("staging", two * 10**9, two, Curve.flat(1e9))
    machine = Machine(SharedStore(Curve.flat(1e8), threads=two), (staging,), ranks=two, decode_threads=two)
    drive = Ssd.from_toml(replace(Ssd.paper(), channels=4 * two).to_toml())

    assert Machine.from_toml(machine.to_toml()) == machine
    assert drive == replace(Ssd.paper(), channels=8)


def test_the_thesis_configuration_file_can_be_said() -> None:
    machine = Machine.from_toml(LISTING_4_7)

    assert machine.network_bytes_per_second == 10e9
    assert machine.source_network_bytes_per_second == 2e9
    assert machine.compute == Rate(100e6, of="bytes")
    assert machine.preprocess_bytes_per_second == 200e6
    assert machine.ranks == 4
    assert machine.source.clients is not None
    assert machine.source.clients.at(3) == pytest.approx(116e6)
    assert [storage.capacity_bytes for storage in machine.storage] == [
        1_024_000_000,
        2_048_000_000,
        10_240_000_000,
    ]
    disk = machine.storage[2]
    assert (disk.backend, disk.path, disk.threads) == ("filesystem", "/tmp/hdmlp", 2)
    assert disk.read == Curve(((1, 192e6), (2, 399e6), (3, 599e6), (4, 637e6)))
    assert disk.write == Curve(((1, 100e6), (4, 300e6)))
    assert disk.latency_seconds == 80e-6


def test_a_training_speed_in_samples_is_kept_in_samples() -> None:
    machine = Machine.from_toml(LISTING_4_7.replace('"100 MB/s"', '"640 samples/s"', 1))

    assert machine.compute == Rate(640.0, of="samples")


def test_what_is_left_out_never_limits() -> None:
    machine = Machine.from_toml(
        '[source]\nread = "50 MB/s"\n[[storage]]\nname = "s"\ncapacity = "1 GB"\nthreads = 1\nread = "9 GB/s"'
    )

    assert machine.network_bytes_per_second == math.inf
    assert machine.preprocess_bytes_per_second == math.inf
    assert machine.compute is None
    assert machine.source.latency_seconds == 0
    assert machine.source.clients is None


def test_a_clients_own_speed_may_be_left_out_where_that_of_all_of_them_is_given() -> None:
    machine = Machine.from_toml(LISTING_4_7.replace('read = "2000 MB/s"', "", 1))

    assert machine.source.read is None
    assert machine.source.clients is not None
    assert Machine.from_toml(machine.to_toml()) == machine


@for_each(
    ("right", "wrong", "message"),
    [
        (
            'capacity = "2048 MB"',
            "capacity = 2048",
            "storage[1].capacity: 2048 has no unit: write for example '4 GB'",
        ),
        (
            "[source]",
            '[[link]]\nbetween = ["a", "b"]\n[source]',
            "link[0].between names 'a'; the devices are none",
        ),
        (
            "[source]",
            '[[link]]\nbetween = ["a"]\n[source]',
            "link[0]: between is ['a']; a link is between two",
        ),
        ("[source]", 2 * '[[device]]\nname = "a"\n' + "[source]", "two devices are called 'a'"),
        ('capacity = "2048 MB"', 'capacity = "0 MB"', "storage[1].capacity: '0 MB' is no space at all"),
        ('capacity = "2048 MB"', 'capacity = "-1 MB"', "storage[1].capacity: '-1 MB'"),
        (
            'capacity = "2048 MB"',
            'capacity = "2048 MB/s"',
            "storage[1].capacity: '2048 MB/s': 'MB/s' is not one of",
        ),
        (
            'capacity = "2048 MB"',
            'capacty = "2048 MB"',
            "storage[1].capacty is not a field; did you mean capacity?",
        ),
        ('capacity = "2048 MB"', "", "storage[1].capacity is missing"),
        ('2 = "399 MB/s"', '2 = "0 MB/s"', "storage[2].read: at 2 users, '0 MB/s' is a rate of zero"),
        ('2 = "399 MB/s"', '2 = "nan MB/s"', "storage[2].read: at 2 users, 'nan MB/s'"),
        ('2 = "399 MB/s"', '2 = "-4 MB/s"', "storage[2].read: at 2 users, '-4 MB/s'"),
        ('2 = "399 MB/s"', '2 = "399 MB"', "storage[2].read: at 2 users, '399 MB': 'MB' is not one of"),
        ('2 = "399 MB/s"', "2 = 399", "storage[2].read: at 2 users, 399 has no unit"),
        ('2 = "399 MB/s"', 'two = "399 MB/s"', "storage[2].read: 'two' is not a number of users"),
        ('2 = "399 MB/s"', '1.5 = "399 MB/s"', "line"),
        ('2 = "399 MB/s"', '2.5 = "399 MB/s"', "storage[2].read: 2 is followed by a dot"),
        ('2 = "399 MB/s"', '1 = "399 MB/s"', "not valid TOML"),
        ('2 = "399 MB/s"', '01 = "399 MB/s"', "storage[2].read: 1 users occur twice"),
        (
            'write = { 1 = "100 MB/s", 4 = "300 MB/s" }',
            "write = {}",
            "storage[2].write: the curve has no points",
        ),
        ('latency = "80 us"', 'latency = "80 MB"', "storage[2].latency: '80 MB'"),
        ('latency = "80 us"', 'latency = "inf s"', "storage[2].latency: 'inf s' never ends"),
        (
            'latency = "80 us"',
            'lattency = "80 us"',
            "storage[2].lattency is not a field; did you mean latency?",
        ),
        ('backend = "filesystem"', 'backend = "tape"', "storage[2]: backend is 'tape'"),
        ('path = "/tmp/hdmlp"', "", "storage[2]: path is missing"),
        ('path = "/tmp/hdmlp"', "path = 5", "storage[2].path: 5 is not text"),
        (
            LISTING_4_7[LISTING_4_7.index("clients") : LISTING_4_7.index("[[")],
            "",
            "source: read is missing, and so is clients",
        ),
        ('read = "2000 MB/s"', 'random_read = "0 kB"', "source.random_read: '0 kB' is no size of a read"),
        ('read = "2000 MB/s"', "random_read = 128", "source.random_read: 128 has no unit"),
        ('read = "2000 MB/s"', 'request = "-1 ms"', "source.request: '-1 ms'"),
        ('read = "2000 MB/s"', 'request = "inf s"', "source.request: 'inf s' never ends"),
        (
            'read = "2000 MB/s"',
            'sequential = "60 MB/s"',
            "source: sequential is 6e+07 bytes/s at 1 clients, below",
        ),
        (
            'read = "2000 MB/s"',
            'sequential = "200 MB/s"',
            "source: sequential is 2e+08 bytes/s at 8 clients, below",
        ),
        ('read = "2000 MB/s"', 'write = "-2 MB/s"', "source.write: '-2 MB/s'"),
        ('read = "2000 MB/s"', 'writes = "2 MB/s"', "source.writes is not a field; did you mean write?"),
        ("ranks = 4", "ranks = 0", "ranks: 0 is below 1"),
        ("ranks = 4", 'ranks = "4"', "ranks: '4' is not an integer"),
        ("ranks = 4", "rank = 4", "rank is not a field; did you mean ranks?"),
        ("ranks = 4", "zebra = 4", "zebra is not a field; the fields are source, storage, ranks"),
        ('network = "10000 MB/s"', "network = 10000", "network: 10000 has no unit"),
        ('network = "10000 MB/s"', 'network = "10 Gb/s"', "network: '10 Gb/s'"),
        ('compute = "100 MB/s"', 'compute = "100 images/s"', "compute: '100 images/s'"),
        ('compute = "100 MB/s"', 'compute = "0 samples/s"', "compute: '0 samples/s' is a rate of zero"),
        ('name = "ram"', 'name = "disk"', "storage[2].name is 'disk', as storage[1] is"),
        ("[source]", "[sauce]", "sauce is not a field; did you mean source?"),
        ("[[storage]]", "[storage]", "not valid TOML"),
        ("ranks = 4", "ranks = ", "not valid TOML"),
        ("ranks = 4", f"ranks = {'[' * 10_000}", "not valid TOML: brackets in brackets"),
        ("ranks = 4", f"ranks = {'9' * 10_000}", "not valid TOML: Exceeds the limit"),
        ("ranks = 4", f"ranks = {'9' * 100}", "ranks: the number is too large"),
        ("ranks = 4", f"ranks = -0x{'f' * 10_000}", "not valid TOML"),
        ("ranks = 4", f"ranks = 0x{'f' * 10_000}", "ranks: the number is too large"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(right: str, wrong: str, message: str) -> None:
    assert right in LISTING_4_7

    with pytest.raises(ConfigError, match=re.escape(message)):
        Machine.from_toml(LISTING_4_7.replace(right, wrong, 1))


def test_storage_that_is_no_list_is_answered_with_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match=re.escape("write each one under [[storage]]")):
        Machine.from_toml('[source]\nread = "1 MB/s"\n[storage]\nname = "s"')


STAGING_PLACE: tuple[str, str | None] = ("memory", None)

rates = st.floats(min_value=1e-3, max_value=1e15)
latencies = st.floats(min_value=0, max_value=1e4)
counts = st.integers(1, 10_000)
curves = st.dictionaries(st.floats(min_value=0.5, max_value=1e4), rates, min_size=1, max_size=4).map(
    lambda found: Curve(tuple(sorted(found.items())))
)
places: st.SearchStrategy[tuple[str, str | None]] = st.one_of(
    st.just(("memory", None)),
    st.tuples(st.just("filesystem"), st.text(st.characters(codec="utf-8"), min_size=1)),
)


def at_least(slow: Curve, times: float) -> Curve:
    """A curve that is above another everywhere, with the same points."""
    return Curve(tuple((users, max(rate, rate * times)) for users, rate in slow.points))


speeds = st.one_of(
    st.tuples(curves, st.none() | curves, st.none()),
    st.tuples(st.none(), curves, st.none() | curves),
    st.builds(lambda slow, times: (slow, None, at_least(slow, times)), curves, st.floats(1, 1e3)),
)


@st.composite
def stores(draw: st.DrawFn) -> SharedStore:
    clients, read, sequential = draw(speeds)
    return SharedStore(
        clients,
        read,
        latency_seconds=draw(latencies),
        threads=draw(counts),
        sequential=sequential,
        random_bytes=draw(st.none() | st.integers(1, 2**63)),
        request_seconds=draw(latencies),
        write=draw(st.none() | curves),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    names = draw(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3, unique=True)
    )
    storage: list[StorageClass] = []
    for name in names:
        backend, path = draw(places if storage else st.just(STAGING_PLACE))
        storage.append(
            StorageClass(
                name=name,
                capacity_bytes=draw(st.integers(1, 2**63)),
                threads=draw(counts),
                read=draw(curves),
                write=draw(st.none() | curves),
                latency_seconds=draw(latencies),
                backend=backend,
                path=path,
            )
        )
    return Machine(
        source=draw(stores()),
        storage=tuple(storage),
        ranks=draw(counts),
        network_bytes_per_second=draw(rates | st.just(math.inf)),
        source_network_bytes_per_second=draw(rates | st.just(math.inf)),
        preprocess_bytes_per_second=draw(rates | st.just(math.inf)),
        compute=draw(st.none() | st.builds(Rate, rates, of=st.sampled_from(["bytes", "samples"]))),
        decode_threads=draw(counts),
        processors=draw(counts | st.just(math.inf)),
        devices=tuple(
            Device(
                name, draw(st.none() | st.integers(0, 2**63)), *(draw(st.none() | rates) for _ in range(2))
            )
            for name in ("a", "/job:b")[: len(storage)]
        ),
        links=tuple(
            draw(
                st.lists(
                    st.builds(DeviceLink, st.just(("a", "/job:b")), latencies, rates | st.just(math.inf)),
                    max_size=2,
                )
            )
            if len(storage) > 1
            else []
        ),
    )


@given(machines())
def test_a_machine_written_down_is_read_back_equal(machine: Machine) -> None:
    assert Machine.from_toml(machine.to_toml()) == machine
