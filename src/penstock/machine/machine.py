"""What each byte costs on one rank's side of a training job.

The letters of the thesis (R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020,
section 3.1.1) stand next to the names: storage class j has capacity d_j, p_j threads and throughputs r_j, w_j;
the shared store has t(gamma).

Bandwidth is shared: whatever a device or link delivers is divided among those who use it at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.machine.places import Device, DeviceLink, Rate, SharedStore, StorageClass
from penstock.machine.tables import Table, at, load_toml
from penstock.machine.toml import cluster_fields, machine_fields, write_machine
from penstock.validate import check_count, check_rate, check_threads


@dataclass(frozen=True, slots=True)
class Cluster:
    """What of a machine runs dataflow graphs.

    devices: the preferred ones first. links: between those whose link is not the network.
    Raises: ConfigError naming the field.
    """

    network_bytes_per_second: float = math.inf
    devices: tuple[Device, ...] = ()
    links: tuple[DeviceLink, ...] = ()

    def __post_init__(self) -> None:
        check_rate("network_bytes_per_second", self.network_bytes_per_second)
        known = [device.name for device in self.devices]
        for name in known:
            if known.count(name) > 1:
                raise ConfigError(f"two devices are called {name!r}: rename one")
        for index, link in enumerate(self.links):
            for name in link.between:
                if name not in known:
                    raise ConfigError(
                        f"link[{index}].between names {name!r}; the devices are {', '.join(known) or 'none'}"
                    )

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """Return the devices and links of a machine's TOML text, which need not say what else a machine has.

        Raises: ConfigError naming the field by its path.
        """
        table = load_toml(text, "the machine")
        if "source" in table or "storage" in table:
            return Machine.from_table(table).cluster
        fields = cluster_fields(table)
        with at(table.path):
            return cls(**fields)


@dataclass(frozen=True, slots=True)
class Machine:
    """A job's hardware as one rank sees it.

    storage: the staging buffer (class 0), then the tiers in the order in which they are preferred.
    ranks: N.
    network_bytes_per_second: b_c, between ranks. source_network_bytes_per_second: b_fs, to the shared store.
    preprocess_bytes_per_second: beta, bytes as stored that one decode thread turns into staged samples on a processor
        of its own.
    compute: c, None where the training's own speed is not known.
    decode_threads: they decode and write into the staging buffer, at least 1.
    processors: that the decode threads share, each on one at most; inf: each has one of its own.
    devices: that run dataflow graphs, the preferred ones first. links: between those whose link is not the network.
    Raises: ConfigError naming the field.
    """

    source: SharedStore
    storage: tuple[StorageClass, ...]
    ranks: int = 1
    network_bytes_per_second: float = math.inf
    source_network_bytes_per_second: float = math.inf
    preprocess_bytes_per_second: float = math.inf
    compute: Rate | None = None
    decode_threads: int = 1
    processors: float = math.inf
    devices: tuple[Device, ...] = ()
    links: tuple[DeviceLink, ...] = ()

    def __post_init__(self) -> None:
        if not self.storage:
            raise ConfigError(
                "storage is empty; its first class is the staging buffer, which every machine has"
            )
        if self.storage[0].backend != "memory":
            raise ConfigError(
                f"storage[0].backend is {self.storage[0].backend!r}; the staging buffer is in memory"
            )
        names = [storage_class.name for storage_class in self.storage]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(
                    f"storage[{index}].name is {name!r}, as storage[{names.index(name)}] is: rename one"
                )
        check_count("ranks", self.ranks)
        check_threads("decode_threads", self.decode_threads)
        if self.processors != math.inf:
            check_count("processors", self.processors)
        check_rate("source_network_bytes_per_second", self.source_network_bytes_per_second)
        check_rate("preprocess_bytes_per_second", self.preprocess_bytes_per_second)
        _ = self.cluster  # which checks devices and links

    @property
    def cluster(self) -> Cluster:
        """What runs dataflow graphs."""
        return Cluster(self.network_bytes_per_second, self.devices, self.links)

    @property
    def knows_decoding(self) -> bool:
        """Whether it says what decoding costs. If not, predictions take it as free."""
        return math.isfinite(self.preprocess_bytes_per_second)

    def source_rate(self, clients: int, reads_in_flight: int) -> float:
        """Return the bytes/s of one read of the shared store.

        clients: gamma, ranks that read from it now, this one included.
        reads_in_flight: reads of this rank that are past their latency, this one included; they share the
            least of b_fs, t(gamma)/gamma and the client's own curve.
        Source: thesis, equation 3.5, with the client's curve and the sharing added.
        """
        store = self.source
        share = math.inf if store.clients is None else store.clients.at(clients) / clients
        own = math.inf if store.read is None else store.read.at(reads_in_flight)
        return min(self.source_network_bytes_per_second, share, own) / reads_in_flight

    def source_seconds(self, requests: float, nbytes: float, clients: int, sample_bytes: float) -> float:
        """Return the time in which the shared store serves one client's reads; see `source_price`.

        requests, nbytes: how many reads, each of consecutive bytes, and their bytes in all.
        """
        return self.source_price(clients, sample_bytes)(requests, nbytes)

    def source_price(self, clients: int, sample_bytes: float) -> Callable[[float, float], float]:
        """Return `source_seconds` as a function of requests and bytes, for whoever asks often.

        clients: gamma, ranks that all read like this at the same time.
        sample_bytes: mean size of a sample: that of the reads with which the store's curves were measured, unless
            `SharedStore.random_bytes` says better.

        A read costs its bytes at the sequential rate and a part that is the same for reads of any size: the store's
        `request_seconds`, and what a read of the measured size took beyond its bytes at the sequential rate. The wire
        is busy with these all the time, unless `SharedStore.threads` reads in flight are too few to cover the latency.
        """
        request_seconds = self.source_request_seconds(clients, sample_bytes)
        rate = self.sequential_rate(clients)
        latency_seconds, threads = self.source.latency_seconds, self.source.threads

        def price(requests: float, nbytes: float) -> float:
            wire = requests * request_seconds + nbytes / rate
            return max(wire, (requests * latency_seconds + wire) / threads)

        return price

    def source_request_seconds(self, clients: int, sample_bytes: float) -> float:
        """Return what one read costs one of so many clients in addition to its bytes; arguments as `source_price`."""
        store = self.source
        measured_bytes = sample_bytes if store.random_bytes is None else store.random_bytes
        scattered = self.source_rate(clients, store.threads) * store.threads
        positioning = measured_bytes * (1 / scattered - 1 / self.sequential_rate(clients))
        return clients * store.request_seconds + max(0.0, positioning)

    def sequential_rate(self, clients: int) -> float:
        """Return the bytes/s of one client's consecutive reads while `clients` ranks read so."""
        store = self.source
        if store.sequential is None:
            return self.source_rate(clients, store.threads) * store.threads
        return min(self.source_network_bytes_per_second, store.sequential.at(clients) / clients)

    def source_write_rate(self, clients: int) -> float:
        """Return the bytes/s at which one of `clients` ranks writes consecutively to the shared store."""
        store = self.source
        if store.write is None:
            return self.sequential_rate(clients)
        return min(self.source_network_bytes_per_second, store.write.at(clients) / clients)

    def remote_rate(self, tier: int, readers: int) -> float:
        """Return the bytes/s of one read of another rank's tier, of `readers` that share it and the link.

        Source: thesis, equation 3.6, where the link's b_c is not divided; here what is shared is divided.
        """
        return min(self.network_bytes_per_second, self.storage[tier].read.at(readers)) / readers

    def local_rate(self, tier: int, readers: int) -> float:
        """Return the bytes/s of one read of this rank's own tier, of `readers` that share it.

        Source: thesis, equation 3.7.
        """
        return self.storage[tier].read.at(readers) / readers

    def write_rate(self, tier: int, writers: float) -> float:
        """Return the bytes/s of one of `writers` into a storage class, by its read curve where no other is known."""
        storage_class = self.storage[tier]
        curve = storage_class.read if storage_class.write is None else storage_class.write
        return curve.at(writers) / writers

    @property
    def decoding_at_once(self) -> float:
        """How many decode threads compute at once: no more than there are processors."""
        return min(self.decode_threads, self.processors)

    def staging_rate(self) -> float:
        """Return the bytes/s that one decode thread writes into the staging buffer, of as many as compute at once."""
        return self.write_rate(0, self.decoding_at_once)

    def write_seconds(self, stored_bytes: int) -> float:
        """Return the time in which one decode thread on a processor of its own turns a read sample into a staged one.

        Preprocessing and writing overlap, so the slower of the two counts; the decode threads that compute share
        the staging buffer's write curve (its read curve where none was measured).
        Source: thesis, section 3.1.3, write_i(k).
        """
        return stored_bytes / min(self.preprocess_bytes_per_second, self.staging_rate())

    def to_toml(self) -> str:
        """Return the text from which `from_toml` makes an equal machine."""
        return write_machine(self)

    @classmethod
    def from_toml(cls, text: str) -> Machine:
        """Return the machine that a TOML text describes.

        The fields are those of the example in `penstock.machine.toml`.
        Raises: ConfigError naming the field by its path, as in ``storage[1].read``.
        """
        return cls.from_table(load_toml(text, "the machine"))

    @classmethod
    def from_table(cls, table: Table) -> Machine:
        """Return the machine that a table describes, be it a file of its own or part of another.

        Raises: ConfigError naming the field by its path.
        """
        fields = machine_fields(table)
        with at(table.path):
            return cls(**fields)
