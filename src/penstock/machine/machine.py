"""What each byte costs on one rank's side of a training job.

The letters of the thesis (R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020,
section 3.1.1) stand beside the names: storage class j has capacity d_j, p_j threads and throughputs r_j, w_j;
the shared store has t(gamma).

Bandwidth is shared: whatever a device or link delivers is divided among those who use it at that moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.machine.checks import check_count, check_rate, check_seconds, check_threads
from penstock.machine.curve import Curve

Backend = Literal["memory", "filesystem"]
BACKENDS: tuple[Backend, ...] = ("memory", "filesystem")


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a training consumes (c): in bytes as stored, or in samples.

    per_second: above zero, finite.
    of: what is counted.
    Raises: ConfigError if the number or the unit cannot be.
    """

    per_second: float
    of: Literal["bytes", "samples"] = "bytes"

    def __post_init__(self) -> None:
        if self.of not in ("bytes", "samples"):
            raise ConfigError(f"of is {self.of!r}; a rate counts 'bytes' or 'samples'")
        if not (math.isfinite(self.per_second) and self.per_second > 0):
            raise ConfigError(f"per_second is {self.per_second!r}; it must be finite and above zero")

    def seconds(self, samples: int, stored_bytes: int) -> float:
        """Return the time to consume so many samples of so many bytes in all, as stored."""
        return (stored_bytes if self.of == "bytes" else samples) / self.per_second


#: Storage classes of these names are local disks, whatever their backend.
DISK_NAMES = ("ssd", "nvme", "disk")


@dataclass(frozen=True, slots=True)
class StorageClass:
    """A place on the rank's own host that can hold samples (storage class j).

    capacity_bytes: d_j, at least 1.
    threads: p_j, how many threads fill it, at least 1.
    read: r_j(p), all readers together, by number of readers.
    write: w_j(p), likewise; None means that the read curve serves for writes too.
    latency_seconds: of each read; reads overlap theirs.
    path: the folder of a class of backend ``filesystem``; None for memory.
    Raises: ConfigError naming the field.
    """

    name: str
    capacity_bytes: int
    threads: int
    read: Curve
    write: Curve | None = None
    latency_seconds: float = 0.0
    backend: Backend = "memory"
    path: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name is empty; a storage class is told from others by its name")
        check_count("capacity_bytes", self.capacity_bytes)
        check_threads("threads", self.threads)
        check_seconds("latency_seconds", self.latency_seconds)
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend is {self.backend!r}; it must be one of {', '.join(BACKENDS)}")
        if self.backend == "filesystem" and not self.path:
            raise ConfigError(
                "path is missing; backend 'filesystem' needs the folder that will hold the samples"
            )
        if self.backend == "memory" and self.path is not None:
            raise ConfigError(
                f"path is {self.path!r}, but backend 'memory' has none: drop it or use 'filesystem'"
            )

    @property
    def is_memory(self) -> bool:
        """Whether samples lie in memory, where they are decoded. A class named as a disk is one."""
        return self.backend == "memory" and self.name.lower() not in DISK_NAMES


@dataclass(frozen=True, slots=True)
class SharedStore:
    """The data set's home, shared by all clients of the job.

    clients: t(gamma), bytes/s of all clients together by number of clients that read at once; None means that
        clients do not slow each other.
    read: bytes/s of one client, all its reads together, by number of its reads that are past their latency; None
        means that the client's own side never limits. Not both are None.
    latency_seconds: of each read, before its bytes flow; reads overlap theirs.
    threads: how many reads one client keeps in flight, at least 1.

    What tells scattered from consecutive reads; the defaults make no difference between them:

    sequential: bytes/s of all clients together while each of them reads long consecutive ranges, by number of clients;
        None means that consecutive reads are as fast as scattered ones. Nowhere below `clients`.
    random_bytes: how large the reads were with which `clients` and `read` were measured; None means as large as the
        samples are on average. Without `sequential` it has no effect.
    request_seconds: what one read costs the store beside its bytes, however large it is: a seek, a look-up. Unlike
        latency it is not overlapped: the store answers at most 1 / request_seconds reads a second, of all clients.
    write: bytes/s of all clients together that write consecutively, by number of clients; None means as fast as they
        read so.
    Raises: ConfigError naming the field.
    """

    clients: Curve | None
    read: Curve | None = None
    latency_seconds: float = 0.0
    threads: int = 1
    sequential: Curve | None = None
    random_bytes: int | None = None
    request_seconds: float = 0.0
    write: Curve | None = None

    def __post_init__(self) -> None:
        if self.clients is None and self.read is None:
            raise ConfigError(
                "read is missing, and so is clients: say how fast the store is, for one client (read) or for all "
                "of them together (clients)"
            )
        check_threads("threads", self.threads)
        check_seconds("latency_seconds", self.latency_seconds)
        check_seconds("request_seconds", self.request_seconds)
        if self.random_bytes is not None:
            check_count("random_bytes", self.random_bytes)
        if self.clients is not None and self.sequential is not None:
            # Both are straight between their points, so the points of both are where one may cross the other.
            for users in sorted(
                {users for curve in (self.clients, self.sequential) for users, _ in curve.points}
            ):
                slow, fast = self.clients.at(users), self.sequential.at(users)
                if fast < slow:
                    raise ConfigError(
                        f"sequential is {fast:g} bytes/s at {users:g} clients, below the {slow:g} of scattered reads "
                        "(clients): a store is not slower at consecutive reads; measure again, or leave it out"
                    )


@dataclass(frozen=True, slots=True)
class Machine:
    """A job's hardware as one rank sees it.

    storage: the staging buffer (class 0), then the tiers in the order in which they are preferred.
    ranks: N.
    network_bytes_per_second: b_c, between ranks. source_network_bytes_per_second: b_fs, to the shared store.
    preprocess_bytes_per_second: beta, bytes as stored that one decode thread turns into staged samples.
    compute: c, None where the training's own speed is not known.
    decode_threads: they decode and write into the staging buffer, at least 1.
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
        check_rate("network_bytes_per_second", self.network_bytes_per_second)
        check_rate("source_network_bytes_per_second", self.source_network_bytes_per_second)
        check_rate("preprocess_bytes_per_second", self.preprocess_bytes_per_second)

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

    def source_wire_seconds(self, requests: float, nbytes: float, clients: int, sample_bytes: float) -> float:
        """Return the time in which the shared store serves one client's reads, one after the other.

        requests, nbytes: how many reads, each of consecutive bytes, and their bytes in all.
        clients: gamma, ranks that all read like this at the same time.
        sample_bytes: mean size of a sample: that of the reads with which the store's curves were measured, unless
            `SharedStore.random_bytes` says better.

        A read costs its bytes at the sequential rate and a part that is the same for reads of any size: the store's
        `request_seconds`, and what a read of the measured size took beyond its bytes at the sequential rate.
        """
        return requests * self.source_request_seconds(clients, sample_bytes) + nbytes / self.sequential_rate(
            clients
        )

    def source_seconds(self, requests: float, nbytes: float, clients: int, sample_bytes: float) -> float:
        """Return the time of such reads for a client that keeps `SharedStore.threads` of them in flight.

        The wire of `source_wire_seconds` is busy all the time, unless so few reads in flight cannot cover the latency.
        """
        wire = self.source_wire_seconds(requests, nbytes, clients, sample_bytes)
        return max(wire, (requests * self.source.latency_seconds + wire) / self.source.threads)

    def source_request_seconds(self, clients: int, sample_bytes: float) -> float:
        """Return what one read costs one of so many clients beside its bytes; arguments as `source_wire_seconds`."""
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

    def write_rate(self, tier: int, writers: int) -> float:
        """Return the bytes/s of one of `writers` into a storage class, by its read curve where no other is known."""
        storage_class = self.storage[tier]
        curve = storage_class.read if storage_class.write is None else storage_class.write
        return curve.at(writers) / writers

    def write_seconds(self, stored_bytes: int) -> float:
        """Return the time in which one decode thread turns a read sample into a staged one.

        Preprocessing and writing overlap, so the slower of the two counts; the decode threads share the
        staging buffer's write curve (its read curve where none was measured).
        Source: thesis, section 3.1.3, write_i(k).
        """
        write_share = self.write_rate(0, self.decode_threads)
        return stored_bytes / min(self.preprocess_bytes_per_second, write_share)

    def to_toml(self) -> str:
        """Return the text from which `from_toml` makes an equal machine."""
        from penstock.machine.toml import write_machine

        return write_machine(self)

    @classmethod
    def from_toml(cls, text: str) -> Machine:
        """Return the machine that a TOML text describes.

        The fields are those of the example in `penstock.machine.toml`.
        Raises: ConfigError naming the field by its path, as in ``storage[1].read``.
        """
        from penstock.machine.toml import read_machine

        return read_machine(text)
