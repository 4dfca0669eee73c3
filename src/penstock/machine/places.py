"""The places that hold samples: the shared store, the storage classes of a rank, and how fast a training consumes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.machine.curve import Curve
from penstock.validate import check_above_zero, check_count, check_rate, check_seconds, check_threads

BACKENDS = ("memory", "filesystem")
#: A class of one's own, "package.module:Name"; see `penstock.store.key_value`.
_OWN_BACKEND = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


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
        check_above_zero("per_second", self.per_second)

    def seconds(self, samples: int, stored_bytes: int) -> float:
        """Return the time to consume so many samples of so many bytes in all, as stored."""
        return (stored_bytes if self.of == "bytes" else samples) / self.per_second


#: Storage classes of these names are local disks, whatever their backend.
DISK_NAMES = ("ssd", "nvme", "disk")
_MOST_WRITING_THREADS = 16


@dataclass(frozen=True, slots=True)
class StorageClass:
    """A place on the rank's own host that can hold samples (storage class j).

    capacity_bytes: d_j, at least 1.
    threads: p_j, how many threads fill it, and read from it at once where it is no memory, at least 1.
    read: r_j(p), all readers together, by number of readers.
    write: w_j(p), likewise; None means that the read curve serves for writes too.
    latency_seconds: of each read; reads overlap theirs.
    backend: "memory", "filesystem", or "package.module:Name", a class of one's own.
    path: the folder of a class of backend ``filesystem``, or what a backend of one's own is made with, such as an
        address; None for memory.
    Raises: ConfigError naming the field.
    """

    name: str
    capacity_bytes: int
    threads: int
    read: Curve
    write: Curve | None = None
    latency_seconds: float = 0.0
    backend: str = "memory"
    path: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name is empty; storage classes are identified by their names")
        check_count("capacity_bytes", self.capacity_bytes)
        check_threads("threads", self.threads)
        check_seconds("latency_seconds", self.latency_seconds)
        if self.backend not in BACKENDS and not _OWN_BACKEND.fullmatch(self.backend):
            raise ConfigError(
                f"backend is {self.backend!r}; it must be one of {', '.join(BACKENDS)}, or a class of your own, "
                "'package.module:Name'"
            )
        if self.backend == "filesystem" and not self.path:
            raise ConfigError(
                "path is missing; backend 'filesystem' needs the folder that will hold the samples"
            )
        if self.backend == "memory" and self.path is not None:
            raise ConfigError(
                f"path is {self.path!r}, but backend 'memory' has none: drop it or use 'filesystem'"
            )

    @property
    def writing_threads(self) -> int:
        """How many threads write samples to it: more than a few take turns at the interpreter."""
        return min(self.threads, _MOST_WRITING_THREADS)

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

    What distinguishes scattered from consecutive reads; the defaults make no difference between them:

    sequential: bytes/s of all clients together while each of them reads long consecutive ranges, by number of clients;
        None means that consecutive reads are as fast as scattered ones. Nowhere below `clients`.
    random_bytes: how large the reads were with which `clients` and `read` were measured; None means as large as the
        samples are on average. Without `sequential` it has no effect.
    request_seconds: what one read costs the store besides its bytes, however large it is: a seek, a look-up. Unlike
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
class Device:
    """What runs nodes of a dataflow graph.

    name: such as "/job:worker/task:0/device:cpu:0". memory_bytes: for variables and tensors; None where nobody counts.
    flops_per_second, memory_bytes_per_second: what its kernels reach, and the rate of its memory, by which nodes that
    nobody measured are estimated; None: as usual for its type.
    Raises: ConfigError naming the field.
    """

    name: str
    memory_bytes: int | None = None
    flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for field in ("flops_per_second", "memory_bytes_per_second"):
            if (rate := getattr(self, field)) is not None:
                check_rate(field, rate)


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """What leads from one device to another, and back.

    between: their names. latency_seconds: of a message. bytes_per_second: inf where it never limits.
    Raises: ConfigError naming the field.
    """

    between: tuple[str, str]
    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if len(self.between) != 2 or self.between[0] == self.between[1]:
            raise ConfigError(f"between is {list(self.between)}; a link is between two devices: name both")
        check_seconds("latency_seconds", self.latency_seconds)
        check_rate("bytes_per_second", self.bytes_per_second)
