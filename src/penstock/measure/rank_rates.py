"""What the ranks of a job get at once from a shared file system, and from each other.

Rank r reads what rank r + 1 wrote, so that its own page cache holds none of it.
Source: thesis, section 5.1.3 (IOR with reorderTasks and randomOffset), Figure 5.3.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import DataError
from penstock.measure.file_rates import Access, MeasuredCurve, ScratchFile, accesses, run_access
from penstock.measure.in_threads import Clock
from penstock.measure.spread import Spread
from penstock.ranks import Ranks

#: Of each rank. At random, little of it is read twice.
_FILE_BYTES, _BLOCK_BYTES = 128 << 20, 8 << 20
#: Ranks hear of each other within 50 ms: a shorter run would hardly be at once.
_LEAST_SECONDS = 0.25
_NETWORK_SHARE = 0.25
_PIECE_BYTES, _TOKEN_BYTES = 1 << 20, 16
_CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RankRates:
    """What was measured over the ranks; the same on every rank.

    clients: bytes/s of all reading ranks together at random, t(gamma), by their number. sequential: likewise, in
        sequence.
    network: bytes/s from each rank to the next one, all at the same time: b_c. is_one_host: so that it is no network.
    """

    clients: MeasuredCurve
    sequential: MeasuredCurve
    network: Spread
    is_one_host: bool

    @property
    def source_network(self) -> float:
        """The most that one rank reads by itself: b_fs."""
        return max(curve.points[0][1].median for curve in (self.clients, self.sequential))


def measure_ranks(
    ranks: Ranks,
    folder: str | os.PathLike[str],
    sample_bytes: float,
    threads: int,
    max_seconds: float,
    clock: Clock,
    report: Callable[[str], None],
    *,
    repeats: int,
) -> RankRates:
    """Measure a shared folder and the network; every rank calls this. threads: that read, of each rank.

    Raises: DataError naming the folder where it cannot be used; what `Ranks.gather_then_decide` raises.
    """
    counts = _counts(ranks.size)
    _, random, sequential, *_ = accesses(max(sample_bytes, 4097.0))
    runs: dict[tuple[Access, int], list[float]] = {
        (access, count): [] for access in (random, sequential) for count in counts
    }
    seconds = max(_LEAST_SECONDS, max_seconds * (1 - _NETWORK_SHARE) / (repeats * len(runs)))
    with _next_ranks_file(ranks, Path(folder)) as scratch:
        for number in range(repeats):
            for (access, count), values in runs.items():
                what = f"{access.label} by {count} ranks, repeat {number}"
                ranks.all_gather(f"begin of {what}", None)
                rate = 0.0
                if ranks.rank < count:
                    rate = run_access(scratch, access, threads, clock() + seconds, clock)
                values.append(float(sum(ranks.all_gather(f"end of {what}", rate))))
            report(f"{folder} by {ranks.size} ranks: round {number + 1} of {repeats}")
    hosts = ranks.all_gather("hosts", socket.gethostname())
    network = _measure_network(ranks, hosts, max_seconds * _NETWORK_SHARE / repeats, clock, repeats)
    clients, in_sequence = (
        MeasuredCurve(access, tuple((count, Spread.of(runs[access, count])) for count in counts))
        for access in (random, sequential)
    )
    return RankRates(clients, in_sequence, network, len(set(hosts)) == 1)


def _counts(size: int) -> list[int]:
    return sorted({*(1 << bit for bit in range(size.bit_length()) if 1 << bit <= size), size})


@contextlib.contextmanager
def _next_ranks_file(ranks: Ranks, folder: Path) -> Iterator[ScratchFile]:
    """Yield the file that the next rank wrote; none has a name any more by then."""
    job = ranks.on_rank_zero("naming the files", lambda: secrets.token_hex(4))
    own = folder / f"penstock-calibrate-{job}-{ranks.rank}.unfinished"

    def write() -> str:
        block = np.random.default_rng().integers(0, 256, _BLOCK_BYTES, np.uint8)
        try:
            with open(own, "xb", buffering=0) as file:
                for _ in range(_FILE_BYTES // block.size):
                    file.write(block.data)
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{folder} cannot be measured: {error.strerror or error}; name a folder that all ranks may write to"
            ) from error
        return own.name

    try:
        names = ranks.gather_then_decide(f"writing to {folder}", write)
        opened: list[ScratchFile] = []

        def open_next() -> None:
            opened.append(ScratchFile(folder, names[(ranks.rank + 1) % ranks.size]))

        ranks.gather_then_decide(f"opening the files in {folder}", open_next)
    finally:
        own.unlink(missing_ok=True)
    with opened[0] as scratch:
        yield scratch


def _measure_network(ranks: Ranks, hosts: list[str], seconds: float, clock: Clock, repeats: int) -> Spread:
    """Return bytes/s over one connection from each rank to the next, all at once: the median of the ranks."""
    token = bytes.fromhex(ranks.on_rank_zero("a token", lambda: secrets.token_hex(_TOKEN_BYTES)))
    following = (ranks.rank + 1) % ranks.size
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", 0)))
        server.settimeout(_CONNECT_SECONDS)
        ports = ranks.all_gather("ports", server.getsockname()[1])
        host = "127.0.0.1" if hosts[following] == hosts[ranks.rank] else hosts[following]
        try:
            outgoing = socket.create_connection((host, ports[following]), _CONNECT_SECONDS)
            stack.enter_context(outgoing).sendall(token)
            incoming = stack.enter_context(_accepted(server, token))
        except OSError as error:
            raise DataError(
                f"rank {ranks.rank} cannot connect to rank {following} on {host!r}: {error.strerror or error}; is "
                "a firewall between them?"
            ) from error
        rates = []
        for number in range(repeats):
            ranks.all_gather(f"begin of sending, repeat {number}", None)
            rate = _exchange(outgoing, incoming, max(_LEAST_SECONDS, seconds), clock)
            rates.append(float(np.median(ranks.all_gather(f"end of sending, repeat {number}", rate))))
    return Spread.of(rates)


def _accepted(server: socket.socket, token: bytes) -> socket.socket:
    """Return the connection of the rank before this one; others do not know the token."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(_CONNECT_SECONDS)
        if connection.recv(len(token), socket.MSG_WAITALL) == token:
            return connection
        connection.close()


def _exchange(outgoing: socket.socket, incoming: socket.socket, seconds: float, clock: Clock) -> float:
    """Send for so long while the rank before does, and return bytes/s of what came."""
    piece, failed = memoryview(bytes(_PIECE_BYTES)), list[OSError]()

    def send() -> None:
        until = clock() + seconds
        try:
            outgoing.sendall(piece)
            while clock() < until:
                outgoing.sendall(piece)
            # One byte that is no zero ends a repeat.
            outgoing.sendall(b"\x01")
        except OSError as error:
            failed.append(error)

    sender = threading.Thread(target=send, name="penstock-calibrate", daemon=True)
    sender.start()
    buffer, received, begin = bytearray(_PIECE_BYTES), 0, clock()
    while (got := incoming.recv_into(buffer)) and not buffer[got - 1]:
        received += got
    elapsed = max(clock() - begin, 1e-9)
    sender.join()
    if failed or not got:
        raise DataError(
            f"a connection between ranks broke: {failed[0] if failed else 'the other side ended'}"
        )
    return received / elapsed
