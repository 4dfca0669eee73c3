"""Decode servers beside a training that waits for decoding: rates, and where the work goes.

    python benchmarks/scale/decode_servers.py            # about three minutes; needs two processors
    python benchmarks/scale/decode_servers.py --share 0.45  # two servers that decode, with so much of a processor each
    python benchmarks/scale/decode_servers.py --sweep    # the rule alone, in virtual time, against fixed cuts

The training decodes by one thread on one processor and computes nothing. Beside it, on the second processor: one server
that decodes; and --servers 2 servers that do not compute but wait: each has made its crops before, and hands one out in
the time that decoding takes this training, one after the other, as a server with a processor of its own would. What is
left of these is encryption, 0.3 ms a crop, for which they share the second processor. Runs of the training alone, with
the server and with those that wait alternate, --rounds times; printed are medians with the least and most, and the
processor time of the training for a sample: what of it a sample takes that a server decoded, by part, and how much it
may take where servers which never wait make the rate --wanted times that of the training alone. Batches of all runs are
compared by their checksums.

--share: the training has this share of the first processor, and each of --servers servers that decode the same share of
the others, by cgroups, so that two processors stand for more that are slower. Runs of the training alone, with its
share, and with the servers alternate. Printed is also what each took of its processor while the training ran, and in
how many of the --period-ms it was stopped as its share was used up: who took less than the share had to wait, or
something else had its processor. Needs the right to make cgroups.

--sweep: this process and two servers, whose speeds and links take each of several values; a processor decodes a sample
in 2 ms here, and finishes what came from a server in 0.4 ms. Printed: the rate by the rule over the best of all here
and all there, and over the most that any mixture could have.
--quick: few samples, one round; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cv2
import numpy as np
from _cpu_groups import GroupCounts, counts_of, cpu_groups, enter

from penstock.loader import Loader
from penstock.loader.decode_serving import serving
from penstock.loader.transforms import (
    ColorJitter,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToTensor,
)
from penstock.policy.decode_split import HERE, DecodeSplit
from penstock.ranks.access import Address
from penstock.ranks.decode_access import KEY
from penstock.store import ImageFolder

#: In the environment: whether colours are changed, too.
JITTER = "DECODE_SERVERS_JITTER"
TRANSFORMS = [
    RandomResizedCrop(224),
    RandomHorizontalFlip(),
    *([ColorJitter(0.4, 0.4, 0.4)] if os.environ.get(JITTER) else []),
    ToTensor(),
    Normalize((0.485, 0.456, 0.406), (0.2, 0.2, 0.2)),
]
#: The first epochs of a run are not timed, in which slots are written for the first time, and servers show their speed;
#: nor the last, at whose end servers do what they have been given and nobody else has work.
BATCH, BEFORE, TIMED = 32, 2, 3
EPOCHS = BEFORE + TIMED + 1


class Waiting:
    """Hands out crops that another maker has made, in the time that a processor would take for each."""

    def __init__(self, maker: Any, samples: int, seconds: float) -> None:
        self.each_bytes, self._seconds, self._lock = maker.each_bytes, seconds, threading.Lock()
        self._free_at = 0.0
        ids = np.arange(samples * EPOCHS)
        self._made = [
            crop for part in np.array_split(ids, max(1, ids.size // 64)) for crop in maker.make(part)
        ]

    def make(self, ids: np.ndarray) -> list[Any]:
        with self._lock:
            self._free_at = max(time.perf_counter(), self._free_at) + ids.size * self._seconds
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return [self._made[each] for each in ids.tolist()]


def make_photos(folder: Path, count: int) -> None:
    """Write photographs of 500 x 375, about 80 kB each, unless there is a folder of images already."""
    if folder.exists():
        return
    random = np.random.default_rng(0)
    (folder / "a").mkdir(parents=True)
    for sample in range(count):
        coarse = random.integers(0, 256, (24, 32, 3), np.uint8)
        picture = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC)
        noisy = cv2.add(picture, random.integers(0, 40, picture.shape, np.uint8))
        cv2.imwrite(str(folder / "a" / f"{sample:05}.jpg"), noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])


def be_server(folder: Path, seconds: float) -> None:
    """Serve until standard input ends. seconds: that each crop takes; 0 for one that decodes."""
    source = ImageFolder(folder)
    with serving(source, Address("127.0.0.1", 0), memory_bytes=1 << 30, threads=1) as made:
        if seconds:
            accept = made.server._accept
            made.server._accept = lambda asked: Waiting(accept(asked), len(source), seconds)
        print(made.address, flush=True)

        def stop() -> None:
            sys.stdin.read()
            made.server.stop()

        threading.Thread(target=stop, daemon=True).start()
        made.server.run()


def part_seconds() -> dict[str, float]:
    """Return the processor time of this process so far, by part; what no thread of Python's takes is ZeroMQ's."""
    received, messages = time.process_time(), 0.0
    for thread in threading.enumerate():
        seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        received -= seconds
        if thread.name.startswith("penstock-peers"):
            messages += seconds
    return {"received and decrypted": received, "messages": messages}


def time_asking(servers: Any) -> list[float]:
    """Return a list that gets the processor time of each thread that has servers make something."""
    seconds, make = list[float](), servers.make

    def timed(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return make(*arguments)
        finally:
            seconds.append(time.thread_time() - began)

    servers.make = timed
    return seconds


def train(folder: Path, servers: list[str], groups: dict[str, str]) -> dict[str, Any]:
    """Return the rate of a training, its processor time for a sample, and a checksum of its batches.

    groups: by name of a process, the cgroup that has it; of them, too, what they took.
    """
    value = count = 0
    with Loader(
        folder,
        batch_size=BATCH,
        epochs=EPOCHS,
        transforms=TRANSFORMS,
        memory="1 GB",
        policy="staging",
        decoders=1,
        decode_servers=servers,
        report=None,
    ) as loader:
        found = getattr(loader._parts.fetcher, "_servers", None)
        for images, _ in itertools.chain.from_iterable(itertools.repeat(loader, BEFORE)):
            value = zlib.crc32(images[:, :, ::16, ::16].tobytes(), value)
        asking = [] if found is None else time_asking(found)
        served = 0 if found is None else found.served
        before_all = {name: counts_of(Path(group)) for name, group in groups.items()}
        began, computed, summing, parts = time.perf_counter(), time.process_time(), 0.0, part_seconds()
        for _ in range(TIMED):
            for images, labels in loader:
                before = time.thread_time()  # of the one processor: others may have it in between
                value, count = zlib.crc32(images[:, :, ::16, ::16].tobytes(), value), count + len(labels)
                summing += time.thread_time() - before
        elapsed, computed = time.perf_counter() - began, time.process_time() - computed - summing
        seconds = elapsed - summing
        took = {
            name: took_of(before_all[name], counts_of(Path(group)), elapsed) for name, group in groups.items()
        }
        parts = {name: seconds - parts[name] for name, seconds in part_seconds().items()}
    if found is not None:
        served = found.served - served
        parts["asked for and verified"] = sum(asking)
        parts["finished"] = served * found.split.finish_seconds
    return {
        "rate": count / seconds,
        "cpu_ms": 1e3 * computed / count,
        "crc": value,
        "served": served / count,
        "took": took,
        "parts_ms": {name: 1e3 * seconds / served for name, seconds in parts.items()} if served else {},
    }


def took_of(before: GroupCounts, after: GroupCounts, seconds: float) -> list[float]:
    """Return the share of a processor that a group took, and of its periods those that it was stopped in."""
    periods = max(1, after.periods - before.periods)
    return [(after.seconds - before.seconds) / seconds, (after.throttled - before.throttled) / periods]


#: Where a process runs: the number of its processor, and the cgroup that limits it, or nothing.
Seat = tuple[int, str]


def settle(processor: int, group: str) -> None:
    """Have this process run on one processor alone, and in a cgroup."""
    os.sched_setaffinity(0, {processor})
    if group:
        enter(Path(group))


def run_train(
    folder: Path, servers: Sequence[str], seat: Seat, groups: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    arguments = json.dumps([*seat, str(folder), list(servers), dict(groups)])
    command = [sys.executable, __file__, "--train", arguments]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


@contextlib.contextmanager
def running_servers(folder: Path, seats: Sequence[Seat], seconds: float) -> Iterator[list[str]]:
    """Run a server at each seat; yield their addresses."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps([*seat, str(folder), seconds])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seat in seats
    ]
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.communicate()


def compare(images: Path | None, photos: int, rounds: int, servers: int, wanted: float) -> None:
    """Print rates alone, with a server that decodes, and with some that wait."""
    processors = sorted(os.sched_getaffinity(0))
    here, there = (processors[0], ""), (processors[-1], "")
    with tempfile.TemporaryDirectory() as name:
        folder, os.environ[KEY.variable] = images or Path(name, "photos"), str(Path(name, "key"))
        make_photos(folder, photos)
        alone = [run_train(folder, [], here)]
        each_seconds = 1 / alone[0]["rate"]
        with (
            running_servers(folder, [there], 0.0) as real,
            running_servers(folder, servers * [there], each_seconds) as waiting,
        ):
            sets = {
                "a server that decodes": real,
                f"{servers} that wait {1e3 * each_seconds:.1f} ms a crop": waiting,
            }
            for addresses in sets.values():  # which learn what they will be asked for
                run_train(folder, addresses, here)
            runs: dict[str, list[dict[str, Any]]] = {"alone": [], **{each: [] for each in sets}}
            for _ in range(rounds):
                runs["alone"].append(run_train(folder, [], here))
                for name, addresses in sets.items():
                    runs[name].append(run_train(folder, addresses, here))
        assert len({run["crc"] for each in runs.values() for run in each}) == 1, "batches differ"
        print_rates(runs)
        alone_ms = statistics.median(run["cpu_ms"] for run in runs["alone"])
        print_limit(runs[name], alone_ms, servers, wanted)


def compare_shares(
    images: Path | None,
    photos: int,
    rounds: int,
    servers: int,
    wanted: float,
    share: float,
    period_seconds: float,
) -> None:
    """Print rates alone and with servers that decode, where each process has a share of a processor."""
    names = ["training", *(f"server {number}" for number in range(1, servers + 1))]
    with contextlib.ExitStack() as stack:
        try:
            groups = stack.enter_context(cpu_groups(names, share, period_seconds))
        except OSError as error:
            print(
                f"no cgroup can be made here for a share of a processor: {error}; try as root, outside a container"
            )
            return
        first, *others = sorted(os.sched_getaffinity(0))
        seated = [first, *itertools.islice(itertools.cycle(others or [first]), servers)]
        here, *there = zip(seated, map(str, groups.values()), strict=True)
        own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder, os.environ[KEY.variable] = images or own / "photos", str(own / "key")
        make_photos(folder, photos)
        addresses = stack.enter_context(running_servers(folder, there, 0.0))
        sides = {"alone": [], f"{servers} servers, {share:g} of a processor each": addresses}
        for each in sides.values():  # servers learn what they will be asked for
            run_train(folder, each, here)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, each in sides.items():
                runs[name].append(
                    run_train(folder, each, here, {name: str(group) for name, group in groups.items()})
                )
    assert len({run["crc"] for each in runs.values() for run in each}) == 1, "batches differ"
    print_rates(runs)
    ratios = [run["rate"] / alone["rate"] for alone, run in zip(runs["alone"], runs[name], strict=True)]
    print(
        f"{statistics.median(ratios):.2f} x alone ({min(ratios):.2f} to {max(ratios):.2f}), median of pairs; wanted "
        f"{wanted:g}"
    )
    for side, found in runs.items():
        for process in names if side != "alone" else names[:1]:
            took, stopped = (
                statistics.median(run["took"][process][index] for run in found) for index in (0, 1)
            )
            print(
                f"{side}: {process} took {took:.2f} of a processor, stopped in {100 * stopped:.0f} % of periods"
            )
    print_limit(runs[name], statistics.median(run["cpu_ms"] for run in runs["alone"]), servers, wanted)


def print_rates(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    usual = statistics.median(run["rate"] for run in runs["alone"])
    for name, found in runs.items():
        rates = sorted(run["rate"] for run in found)
        rate, cpu_ms, served = (
            statistics.median(run[key] for run in found) for key in ("rate", "cpu_ms", "served")
        )
        print(
            f"{name:32} {rate:7.0f} samples/s ({rates[0]:.0f} to {rates[-1]:.0f}), {rate / usual:.2f} x alone; "
            f"{cpu_ms:.2f} ms of the training's processor a sample; {100 * served:.0f} % served"
        )


def print_limit(runs: Sequence[dict[str, Any]], alone_ms: float, servers: int, wanted: float) -> None:
    """Print what a served sample took of the training's processor, and what it may take.

    With servers that never wait, each as fast as the training alone, these serve `servers` times its rate, and what
    they leave of its processor decodes. It takes what is left of the run's processor time, and what its parts take at
    least: samples that are decoded beside servers come in larger groups, and may take less than alone.
    runs: with these servers. alone_ms: of a sample that the training decodes alone.
    """
    each_ms = [(run["cpu_ms"] - (1 - run["served"]) * alone_ms) / max(run["served"], 1e-9) for run in runs]
    parts = {
        name: statistics.median(run["parts_ms"].get(name, 0.0) for run in runs)
        for name in runs[0]["parts_ms"]
    }
    took_ms = max(statistics.median(each_ms), sum(parts.values()))
    shown = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
    print(
        f"a served sample takes {took_ms:.2f} ms of the training's processor (decoding {alone_ms:.2f}): {shown}, else "
        f"{took_ms - sum(parts.values()):.2f}"
    )
    most_ms = alone_ms * (servers + 1 - wanted) / servers
    reached = servers + 1 - servers * took_ms / alone_ms
    print(
        f"{wanted:g} x alone by {servers} such servers needs {most_ms:.2f} ms at most; {took_ms:.2f} ms lets have "
        f"{reached:.2f} x"
    )


# -- The rule, in virtual time --

DECODE_SECONDS, FINISH_SECONDS, CROP_BYTES, GROUP, IN_FLIGHT = 2e-3, 0.4e-3, 150_528, 16, 12


def virtual_rate(server_seconds: float, link: float, cut: str, samples: int) -> float:
    """Return samples a second. cut: "rule", "here", or "there", which takes two servers in turn.

    Each server decodes its line in order and sends it over a link of its own; here one processor decodes and finishes.
    """
    split, now, turn = DecodeSplit(2, 0.1e-3), 0.0, 0
    split.decode_seconds, split.finish_seconds = DECODE_SECONDS, FINISH_SECONDS - 0.1e-3
    each_seconds = max(server_seconds, CROP_BYTES / link)
    free_at, processor = [0.0, 0.0, 0.0], 0.0
    #: When, what: (0, ...) a group that arrives here to be finished; (1, ...) one that is done.
    events: list[tuple[float, int, int, Any]] = []
    number = given_out = done = in_flight = 0
    while done < samples:
        while given_out < samples and in_flight < IN_FLIGHT:
            turn = turn % 2 + 1
            away = {"rule": (), "here": (1, 2), "there": (3 - turn,)}[cut]
            if cut == "there":
                split.places[HERE].seconds, split.places[turn].seconds = 1e9, 1e-9
            given = split.give(GROUP, now, away)
            number, given_out, in_flight = number + 1, given_out + given.samples, in_flight + 1
            if given.place == HERE:
                processor = max(now, processor) + given.samples * DECODE_SECONDS
                heapq.heappush(events, (processor, 1, number, given))
            else:
                free_at[given.place] = max(now, free_at[given.place]) + given.samples * each_seconds
                heapq.heappush(events, (free_at[given.place], 0, number, given))
        now, kind, _, given = heapq.heappop(events)
        if kind == 0:
            split.done(given, now)
            processor = max(now, processor) + given.samples * FINISH_SECONDS
            heapq.heappush(events, (processor, 1, number, given))
            continue
        if given.place == HERE:
            split.done(given, now)
        else:
            split.computed(given.samples, given.samples * (FINISH_SECONDS - 0.1e-3), is_here=False)
        done, in_flight = done + given.samples, in_flight - 1
    return done / now


def sweep(samples: int) -> None:
    """Print what the rule does for servers and links of several speeds."""
    behind, ahead = 10.0, 0.0
    print("server ms  link MB/s   rule/s   here/s  there/s  rule / best cut  rule / most")
    for server_ms in (0.5, 1, 2, 4, 8, 32):
        for link in (1e6, 10e6, 50e6, 125e6, 1250e6):
            rates = {
                cut: virtual_rate(1e-3 * server_ms, link, cut, samples) for cut in ("rule", "here", "there")
            }
            served = min(2 / max(1e-3 * server_ms, CROP_BYTES / link), 1 / FINISH_SECONDS)
            most = served + (1 - served * FINISH_SECONDS) / DECODE_SECONDS
            best = rates["rule"] / max(rates["here"], rates["there"])
            behind, ahead = min(behind, best), max(ahead, best)
            shown = " ".join(f"{rates[cut]:8.0f}" for cut in ("rule", "here", "there"))
            print(f"{server_ms:9g} {link / 1e6:10g} {shown} {best:16.2f} {rates['rule'] / most:12.2f}")
    print(f"over the best fixed cut: {behind:.2f} at least (wanted 0.95), {ahead:.2f} at most")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few samples, one round")
    parser.add_argument("--sweep", action="store_true", help="the rule alone, in virtual time")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2, help="that wait; with --share, that decode")
    parser.add_argument("--wanted", type=float, default=2.4, help="rate with these, over the training alone")
    parser.add_argument("--share", type=float, metavar="X", help="of a processor, that each process has")
    parser.add_argument("--period-ms", type=float, default=10.0, help="in which a process has its share")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="a folder of images, in place of drawn ones"
    )
    parser.add_argument(
        "--jitter", action="store_true", help="change brightness, contrast and saturation, too"
    )
    for hidden in ("--train", "--serve"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train is not None:
        processor, group, folder, servers, groups = json.loads(given.train)
        settle(processor, group)
        print(json.dumps(train(Path(folder), servers, groups)))
    elif given.serve is not None:
        processor, group, folder, seconds = json.loads(given.serve)
        settle(processor, group)
        be_server(Path(folder), seconds)
    elif given.sweep:
        sweep(4_000 if given.quick else 40_000)
    else:
        if given.jitter:
            os.environ[JITTER] = "1"
        photos, rounds = (24, 1) if given.quick else (given.samples, given.rounds)
        if given.share is None:
            compare(given.images, photos, rounds, given.servers, given.wanted)
        else:
            compare_shares(
                given.images, photos, rounds, given.servers, given.wanted, given.share, 1e-3 * given.period_ms
            )


if __name__ == "__main__":
    main()
