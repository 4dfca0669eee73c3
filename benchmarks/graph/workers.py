"""What it costs to hand a tensor from one worker to another, against the carrier's own messages.

    python benchmarks/graph/workers.py [--rounds N] [--no-shared-memory] [--quick]

For each size: a chain of negations whose nodes take turns on two workers, so that each negation is followed by a hop;
the time of a hop with its negation is the difference between a long chain and one of two hops, so that the request of
the client and its answer do not count. In it, the thread of a step waits for the tensor at the local socket, negates it
and sends it. The same chain on one worker, in turn with it, is the time of a negation alone; the rest is Send and Recv:
writing to shared memory, messages, the executor, and whatever the negation takes longer because its input was
written by another processor. Two ratios are printed for each message below: with the negation, and without it.
Beside it, in turn, the same bytes to and fro between two processes that do nothing else:

    by the link    the same local socket and memory that both map, by the same code; the thread that waits receives and
                   sends back what came, which copies it into a block as a Send does, without a graph, a step or a
                   kernel
    encrypted      by the messages of ZeroMQ with CURVE that workers of different hosts use; ZeroMQ's own threads
                   receive and send, and the thread that waits is told of it
    least          small ones alone: a loop that waits at a local socket, receives, negates and sends, which is the
                   least that a hop between Python processes does

Medians over rounds, and the ratios (message / hop; 1 is as fast) with the least and the most of rounds.
--no-shared-memory has workers use encrypted messages on one host, too.

Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.graph import Edge, Graph
from penstock.graph.workers import LocalWorkers, WorkerSession
from penstock.graph.workers.host import HostLink
from penstock.queues import WakingQueue
from penstock.ranks.carrier_zmq import KeyPair, ZmqCarrier

SIZES = {"4 KiB": 4 << 10, "10 MiB": 10 << 20}
SMALL_BYTES = 1 << 14
HOPS = 22


def chain(graph: Graph, x: Edge, hops: int, workers: int) -> Edge:
    """Return what was negated by so many workers in turn, and once more than there are hops."""
    for hop in range(hops + 1):
        with graph.on_device(f"/job:worker/task:{hop % workers}"):
            x = -x
    return x


def seconds_a_link(session: WorkerSession, chains: Sequence[Edge], repeats: int) -> float:
    """Return the time that each further negation takes. chains: of two hops, and of HOPS."""
    seconds_of(session, chains[1], 1)
    short, long = (seconds_of(session, end, repeats) for end in chains)
    return (long - short) / (HOPS - 2)


def seconds_of(session: WorkerSession, target: Edge, repeats: int) -> float:
    """Return the median time of a run that fetches nothing."""
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        session.run((), targets=[target])
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def echo(secret: bytes, port: int, ready: int) -> None:
    """Send back what comes, until nothing is in it."""
    carrier = ZmqCarrier("127.0.0.1", 1 << 30, keys=KeyPair.of(secret, "there"), port=port)
    carrier.admit(KeyPair.of(secret, "here").public, 0)
    os.write(ready, carrier.offer["address"].encode("ascii"))
    while True:
        for _, who, (part,) in carrier.receive(None):
            if not len(part):
                return
            carrier.answer(who, [part])


def echo_by_link(secret: bytes, ready: int) -> None:
    """Send back what comes by a local socket, until nothing is in it."""
    queue: WakingQueue[list[Any]] = WakingQueue()
    link = HostLink(secret, "there", queue.put)
    os.write(ready, b"!")
    parts = link.get_within(queue, None)
    link.connect(["here"])
    while len(parts[0]):
        link.send("here", parts)
        del parts  # its memory is free
        parts = link.get_within(queue, None)


def link_seconds(nbytes: int, repeats: int) -> float:
    """Return the median time of one message between workers of a host, half of a round trip."""
    secret, (come, ready) = os.urandom(32), os.pipe()
    if (child := os.fork()) == 0:
        try:
            echo_by_link(secret, ready)
        finally:
            os._exit(0)
    os.read(come, 1)
    queue: WakingQueue[list[Any]] = WakingQueue()
    link = HostLink(secret, "here", queue.put)
    link.connect(["there"])
    # Of zeros it would be one page of the kernel's, which lies in the cache.
    took, message = [], np.ones(nbytes, np.uint8).data
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        link.send("there", [message])
        link.get_within(queue, None)
        took.append((time.perf_counter() - begin) / 2)
    link.send("there", [b""])
    os.waitpid(child, 0)
    link.close()
    for end in (come, ready):
        os.close(end)
    return statistics.median(took[1:])


def relay(end: socket.socket, rounds: int) -> list[float]:
    """Negate what comes and send it back; return when each came."""
    epoll, buffer, came = select.epoll(), bytearray(1 << 16), []
    epoll.register(end, select.EPOLLIN)
    for _ in range(rounds):
        epoll.poll()
        received = bytearray(memoryview(buffer)[: end.recv_into(buffer)])
        came.append(time.perf_counter())
        end.send(torch.neg(torch.from_numpy(np.frombuffer(received, np.float32))).numpy().data)
    return came


def least_seconds(nbytes: int, repeats: int) -> float:
    """Return the median time of a hop of a loop that does nothing else."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (child := os.fork()) == 0:
        try:
            relay(there, repeats + 1)
        finally:
            os._exit(0)
    here.send(bytes(nbytes))
    came = relay(here, repeats + 1)
    os.waitpid(child, 0)
    for end in (here, there):
        end.close()
    return statistics.median(np.diff(came)) / 2


def carrier_seconds(nbytes: int, repeats: int) -> float:
    """Return the median time of one message of the carrier, half of a round trip."""
    secret, (come, ready) = os.urandom(32), os.pipe()
    if (child := os.fork()) == 0:
        try:
            echo(secret, 0, ready)
        finally:
            os._exit(0)
    carrier = ZmqCarrier(None, 1 << 30, keys=KeyPair.of(secret, "here"))
    key = KeyPair.of(secret, "there").public.decode("ascii")
    carrier.connect({0: {"address": os.read(come, 200).decode("ascii"), "key": key}})
    took, message = [], np.ones(nbytes, np.uint8).data
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        carrier.ask(0, [message])
        while not carrier.receive(None):
            pass
        took.append((time.perf_counter() - begin) / 2)
    carrier.ask(0, [b""])
    os.waitpid(child, 0)
    carrier.close()
    for end in (come, ready):
        os.close(end)
    return statistics.median(took[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of small tensors")
    parser.add_argument("--no-shared-memory", action="store_true", help="send as between hosts")
    given = parser.parse_args(arguments)
    sizes = {"4 KiB": SIZES["4 KiB"]} if given.quick else SIZES
    repeats, rounds = (2, 1) if given.quick else (30, given.rounds)
    graph, targets = Graph(), {}
    for name, nbytes in sizes.items():
        with graph.on_device("/job:worker/task:0"):
            x = graph.variable("float32", [nbytes // 4], initial=np.ones(nbytes // 4, np.float32))
        read = graph.add("Read", x)
        targets[name] = [[chain(graph, read, hops, count) for hops in (2, HOPS)] for count in (1, 2)]
    init = graph.initialize_all()
    with (
        LocalWorkers(2) as workers,
        WorkerSession(
            graph, workers.addresses, workers.secret, shares_memory=not given.no_shared_memory
        ) as session,
    ):
        session.run(init)
        for name, (alone, parted) in targets.items():
            kernels, hops = [], []
            messages: dict[str, list[float]] = {"by the link": [], "encrypted": []}
            if sizes[name] <= SMALL_BYTES:
                messages["least"] = []
            for _ in range(rounds):
                hops.append(seconds_a_link(session, parted, repeats))
                kernels.append(seconds_a_link(session, alone, repeats))
                messages["by the link"].append(link_seconds(sizes[name], repeats))
                messages["encrypted"].append(carrier_seconds(sizes[name], repeats))
                if "least" in messages:
                    messages["least"].append(least_seconds(sizes[name], repeats))
            sends = [hop - kernel for hop, kernel in zip(hops, kernels, strict=True)]
            print(
                f"{name}: {microseconds(hops)} a hop: {microseconds(kernels)} the negation, "
                f"{microseconds(sends)} Send and Recv"
            )
            for way, seconds in messages.items():
                print(
                    f"    message alone, {way}: {microseconds(seconds)}: {ratios(seconds, hops)} of a hop, "
                    f"{ratios(seconds, sends)} of Send and Recv"
                )


def microseconds(seconds: Sequence[float]) -> str:
    return f"{1e6 * statistics.median(seconds):,.0f} us"


def ratios(messages: Sequence[float], hops: Sequence[float]) -> str:
    """Return the median of the ratios of rounds, the least and the most."""
    each = [message / hop for message, hop in zip(messages, hops, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    main()
