"""What it takes to bring an inference worker's weights up to date: bytes, and seconds from end to end.

    python benchmarks/snapshots/sequences.py --only gpt-fp32 gpt-bf16    # once: what is sent
    python benchmarks/snapshots/refresh.py [--quick] [--sequences FOLDER] [--folder FOLDER] [--rounds N]

A trainer holds the weights of neighbouring snapshots of a training (8 steps apart) in turn; a worker in a process of
its own is brought from each to the next, over a Unix socket, in three ways, one after the other:

    differences     ours: the trainer saves a snapshot, `SnapshotStore.refresh` is sent, `Refresher.apply` applies it
    index + value   of each weight that changed its place, in 4 bytes, and its new value; by torch
    full            all weights

Bytes are of what is sent. Seconds are medians over the pairs: until the worker has answered that its weights are in
place. Those of a difference begin at the save, encoding and syncing included, which a training that saves snapshots
does anyway; what is left without it is told beside. After each refresh the worker's bits are compared with the
trainer's, outside of the time. Within one machine bytes cost next to nothing; the last column is the rate of a link
below which differences arrive sooner than all weights, the save counted (then: not).
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import sequences
import torch
import xxhash

from penstock.checkpoint import Keep, Refresher, SnapshotStore
from penstock.units import format_bytes, format_rate, format_seconds

WAYS = ("differences", "index + value", "full")
#: Of the bytes of index and value, on sequences in bfloat16.
TARGET = 0.78
INDEX_BYTES = 4
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Weights = dict[str, torch.Tensor]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, one pair: shows that it runs")
    parser.add_argument("--sequences", type=Path, default=sequences.FOLDER, metavar="FOLDER")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=list(sequences.TRAININGS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="through each group")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = options.sequences
        names = options.only or ["gpt-fp32", "gpt-bf16"]
        if options.quick:
            folder, names = Path(scratch) / "sequences", ["gpt-bf16"]
            sequences.main(["--quick", "--folder", str(folder), "--only", *names])
        print(f"{date.today()}, {platform.machine()}, {multiprocessing.cpu_count()} processors")
        judged = []
        with worker() as connection:
            for sequence in sequences.read_sequences(folder, names):
                print(f"\n{sequence.name}: {sequence.description}; {sequence.parameters:,} weights")
                print(HEADER)
                for group in sequences.GROUPS:
                    figures = measure(connection, sequence, group, Path(scratch), options.rounds)
                    print(figures)
                    if "bf16" in sequence.name:
                        judged.append((f"{sequence.name}, {group}", figures.share))
        print("\nTargets")
        for name, share in judged:
            met = "met    " if share <= TARGET else "NOT MET"
            print(f"  {met} {name}: {share:.3f} of the bytes of index + value (at most {TARGET})")


# -- What is measured --------------------------------------------------------------------------------------


HEADER = (
    f"  {'group':8}{'changed':>9}{'index + value':>15}{'differences':>13}{'share':>7}{'full':>10}"
    f"{'seconds: save':>15}{'+ send':>9}{'index':>9}{'full':>9}  sooner below"
)


@dataclass
class Figures:
    """Of one group. changed: share of the weights. sent: bytes, seconds: by way; save: of a snapshot."""

    group: str
    changed: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    sent: dict[str, list[int]] = field(default_factory=lambda: {way: [] for way in WAYS})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    @property
    def share(self) -> float:
        """Return the bytes of differences, of those of index and value."""
        return sum(self.sent["differences"]) / sum(self.sent["index + value"])

    def __str__(self) -> str:
        """Return a row of the table."""
        sent = {way: float(np.median(of)) for way, of in self.sent.items()}
        seconds = {way: float(np.median(of)) for way, of in self.seconds.items()}
        save = float(np.median(self.save))
        saved_bytes = sent["full"] - sent["differences"]
        rates = []
        for ours in (save + seconds["differences"], seconds["differences"]):
            later = ours - seconds["full"]
            is_never, is_always = saved_bytes <= 0, later <= 0
            rates.append("never" if is_never else "always" if is_always else format_rate(saved_bytes / later))
        return (
            f"  {self.group:8}{np.mean(self.changed):>9.1%}{format_bytes(round(sent['index + value'])):>15}"
            f"{format_bytes(round(sent['differences'])):>13}{self.share:>7.3f}{format_bytes(round(sent['full'])):>10}"
            f"{format_seconds(save):>15}{format_seconds(seconds['differences']):>9}"
            f"{format_seconds(seconds['index + value']):>9}{format_seconds(seconds['full']):>9}"
            f"  {rates[0]} ({rates[1]})"
        )


def measure(
    connection: Connection[Any, Any], sequence: sequences.Sequence, group: str, scratch: Path, rounds: int
) -> Figures:
    """Bring the worker through a group, in all ways."""
    figures = Figures(group)
    snapshots = sequence.group(group)
    for _ in range(rounds):
        with (
            tempfile.TemporaryDirectory(dir=scratch) as folder,
            closing(
                SnapshotStore(folder, keep=Keep(last=None), snap_dis=len(snapshots), report=None)
            ) as store,
        ):
            before = weights_of(sequence, snapshots[0])
            connection.send(
                ("begin", {name: (tensor.dtype, tensor.shape) for name, tensor in before.items()})
            )
            store.save(snapshots[0].step, {"model": before}).wait()
            send_differences(connection, store, None, snapshots[0].step)
            send_full(connection, before)
            send_changed(connection, {name: torch.zeros_like(of) for name, of in before.items()}, before)
            for old, new in pairwise(snapshots):
                after = weights_of(sequence, new)
                begin = time.perf_counter()
                store.save(new.step, {"model": after}).wait()
                figures.save.append(time.perf_counter() - begin)
                for way in WAYS:
                    begin = time.perf_counter()
                    if way == "differences":
                        sent = send_differences(connection, store, old.step, new.step)
                    elif way == "full":
                        sent = send_full(connection, after)
                    else:
                        sent = send_changed(connection, before, after)
                    figures.seconds[way].append(time.perf_counter() - begin)
                    figures.sent[way].append(sent)
                    connection.send(("digest", way))
                    assert connection.recv() == digest(after), f"{way}: the worker has other weights"
                figures.changed.append(
                    sum(int((words(after[name]) != words(before[name])).sum()) for name in after)
                    / sum(tensor.numel() for tensor in after.values())
                )
                before = after
    return figures


def weights_of(sequence: sequences.Sequence, snapshot: sequences.Snapshot) -> Weights:
    """Return a snapshot's weights, without what its optimizer has."""
    return {name: tensor for name, tensor in sequence.load(snapshot).items() if name.startswith("model/")}


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, one-dimensional: what changed is told by them, not by -0.0 == 0.0."""
    return tensor.view(-1).view(WORDS[tensor.element_size()])


def digest(weights: Weights) -> str:
    """Return the hash of all bits."""
    hashed = xxhash.xxh3_128()
    for tensor in weights.values():
        hashed.update(words(tensor).numpy().data)
    return hashed.hexdigest()


# -- The trainer's side ------------------------------------------------------------------------------------


def send_differences(
    connection: Connection[Any, Any], store: SnapshotStore, begin: int | None, end: int
) -> int:
    """Send a refresh, and return its bytes."""
    connection.send(("differences", None))
    sent = 0
    for message in store.refresh(begin, end):
        connection.send_bytes(message)
        sent += len(message)
    assert connection.recv() == end
    return sent


def send_changed(connection: Connection[Any, Any], before: Weights, after: Weights) -> int:
    """Send index and value of what changed, and return the bytes."""
    connection.send(("index + value", None))
    sent = 0
    for name, tensor in after.items():
        new = words(tensor)
        index = (new != words(before[name])).nonzero().view(-1).to(torch.int32)
        for part in (index, new[index]):
            connection.send_bytes(part.numpy().data)
            sent += part.nbytes
    assert connection.recv() == "done"
    return sent


def send_full(connection: Connection[Any, Any], after: Weights) -> int:
    """Send all weights, and return their bytes."""
    connection.send(("full", None))
    for tensor in after.values():
        connection.send_bytes(words(tensor).numpy().data)
    assert connection.recv() == "done"
    return sum(tensor.nbytes for tensor in after.values())


# -- The worker's side -------------------------------------------------------------------------------------


@contextmanager
def worker() -> Iterator[Connection[Any, Any]]:
    """Start a worker, and yield the connection to it."""
    with Listener(family="AF_UNIX", authkey=b"penstock") as listener:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(listener.address,))
        process.start()
        try:
            with listener.accept() as connection:
                yield connection
                connection.send(("end", None))
        finally:
            process.join(30)
            process.kill()
            process.join()
            process.close()


def serve(address: Any) -> None:
    """Keep weights up to date, one copy of them for each way."""
    torch.set_num_threads(1)
    copies: dict[str, Weights] = {}
    refresher = Refresher({})
    with Client(address, authkey=b"penstock") as connection:
        while True:
            order, what = connection.recv()
            if order == "end":
                return
            if order == "begin":
                copies = {
                    way: {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in what.items()}
                    for way in WAYS
                }
                refresher = Refresher({"model": copies["differences"]})
            elif order == "digest":
                connection.send(digest(copies[what]))
            elif order == "differences":
                connection.send(refresher.apply(iter(connection.recv_bytes, None)).step)
            elif order == "full":
                for tensor in copies[order].values():
                    connection.recv_bytes_into(words(tensor).numpy().data.cast("B"))
                connection.send("done")
            else:
                for tensor in copies[order].values():
                    index = torch.frombuffer(
                        bytearray(connection.recv_bytes()) or bytearray(4), dtype=torch.int32
                    )
                    values = connection.recv_bytes()
                    if values:
                        new = torch.frombuffer(bytearray(values), dtype=words(tensor).dtype)
                        words(tensor).index_copy_(0, index.long(), new)
                connection.send("done")


if __name__ == "__main__":
    main()
