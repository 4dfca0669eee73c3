"""How small and how fast codecs make real snapshots: ours, the paper's, and their peers, side by side.

    python benchmarks/snapshots/sequences.py            # once: trainings to measure on
    sh benchmarks/snapshots/set_up_peers.sh             # once: zipnn, pcodec, blosc2, zstandard
    python benchmarks/snapshots/compare_codecs.py [--quick] [--rounds N] [--only NAME...] [--plot PICTURE]
    python benchmarks/snapshots/compare_codecs.py --sizes [--only NAME...]       # distances alone, nothing is timed

Pairs: of every sequence two neighbouring snapshots early, in the middle and late; all floats of the model's type as
one array, the one before as the reference, both in memory. Every codec must give back the same bits before it is
timed. A round encodes and decodes with each codec in turn, in another order each round; printed are the share of the
complete size and GB (10**9 bytes of weights) per second of processor time of all threads, in and out, the median
and the 10th and 90th percentile over rounds. Processor time, because another process's load then costs it less; on a
machine at rest it is the time on one core. Warm: compiled, and one round of each not counted. gzip is timed once.

States: weights and optimizer state of ten snapshots, the first a baseline, progressive (snap_dis 10), against the
paper's scheme (DynRLE of every delta, Huffman-coded exponents of the baseline). Scalars such as step counts are left
out (some hundred bytes).

Methods: the paper's seven, at snap_dis 10, and how its chain's deltas grow with snap_dis 3, 5, 10.

Distances: shares of `speed`, of DynRLE and of zipnn by how many steps the snapshots of a pair are apart; and of all
blocks of the neighbours' weights and optimizer states, how many are larger as a difference than alone.

Two threads: how many times as fast as one, on the wall clock, over the rounds in which no thread had to wait for a
processor; how many these are is printed.

Ends with the targets, each met or not.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import site
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import sequences
from model_bits import model_bits
from peer_codecs import Contender, MemoryCopy, peers

from penstock.checkpoint.codecs import codec_named, decode_block
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Codec, Coder, Kind, Pair
from penstock.checkpoint.codecs.ours import OwnCodec
from penstock.checkpoint.state.dtypes import DType, dtype_named
from penstock.checkpoint.state.tensors import Bytes, blocks_of
from penstock.policy.delta_schemes import Scheme, reference_of
from penstock.simulate.snapshots import METHODS

PEERS = Path(__file__).resolve().parent.parent / ".cache" / "snapshot-peers"
PRESETS = QUICK, WITH_CONTEXTS = "speed", "balance"
#: What contexts are measured against; no preset.
CONTEXT_FREE = OwnCodec("one context", most_contexts=1, most_groups=1, stride=16)
SLOW = ("gzip-delta",)
#: A preset is of like speed with a peer when it encodes at no less than this part of the peer's rate.
LIKE_SPEED = 0.8
SNAP_DIS = 10


def main(arguments: list[str] | None = None) -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sequences, one round: shows that it runs")
    parser.add_argument("--sequences", type=Path, default=sequences.FOLDER, metavar="FOLDER")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="FOLDER", help="that of set_up_peers.sh")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these sequences")
    parser.add_argument("--sizes", action="store_true", help="distances alone: nothing is timed")
    parser.add_argument(
        "--plot", type=Path, metavar="PICTURE", help="draw share against speed (.png, .svg, .pdf)"
    )
    options = parser.parse_args(arguments)
    if options.plot:
        from penstock.measure.picture import check_picture

        check_picture(options.plot)
    for packages in options.peers.glob("lib/python*/site-packages"):
        site.addsitedir(str(packages))
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.sequences
        if options.quick:
            folder = Path(scratch)
            sequences.main(["--quick", "--folder", scratch, "--only", *(options.only or sequences.TRAININGS)])
        found = sequences.read_sequences(folder, options.only)
        print(
            f"{date.today()}, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
        )
        if options.sizes:
            compare_distances(found)
        else:
            compare(found, rounds, options.plot)


def compare(found: list[sequences.Sequence], rounds: int, plot: Path | None) -> None:
    """Run and print all parts."""
    results = [
        time_pair(f"{sequence.name} {group}", *weights_of_pair(sequence, group), rounds)
        for sequence in found
        for group in sequences.GROUPS
    ]
    compare_distances(found)
    states = [compare_states(sequence, group) for sequence in found for group in sequences.GROUPS]
    orders = [
        compare_methods(sequence, group)
        for sequence in found
        if sequence.name in ("cnn-sgd", "gpt-fp32")
        for group in sequences.GROUPS
    ]
    scaling = two_threads(*weights_of_pair(found[-1], "early"), rounds)
    print_targets(results, states, orders, scaling)
    if plot is not None:
        draw(results, plot)
        print(f"\n{plot}: share against speed")


# -- What is encoded -----------------------------------------------------------------------------------------


def kinds_of(sequence: sequences.Sequence, snapshot: sequences.Snapshot) -> tuple[DType, dict[str, Bytes]]:
    """Return the bytes of a snapshot's floats by kind: "model", "exp_avg"..., each tensor after the other."""
    import torch

    kinds: dict[str, list[Any]] = {}
    for name, tensor in sequence.load(snapshot).items():
        if tensor.is_floating_point() and tensor.ndim > 0:
            kind = "model" if name.startswith("model/") else name.rpartition("/")[2]
            kinds.setdefault(kind, []).append(tensor.flatten())
    whole = {kind: torch.cat(tensors) for kind, tensors in kinds.items()}
    dtype = dtype_named(str(whole["model"].dtype).removeprefix("torch."))
    return dtype, {kind: tensor.view(torch.uint8).numpy() for kind, tensor in whole.items()}


def kinds_of_pair(
    sequence: sequences.Sequence, group: str, apart: int = 1
) -> tuple[DType, dict[str, Bytes], dict[str, Bytes]]:
    """Return two snapshots from the middle of a group, so many places apart: the new one, and the reference."""
    snapshots = sequence.group(group)
    place = max(len(snapshots) // 2, apart)
    (dtype, new), (_, old) = (kinds_of(sequence, snapshots[index]) for index in (place, place - apart))
    return dtype, new, old


def weights_of_pair(sequence: sequences.Sequence, group: str, apart: int = 1) -> tuple[DType, Bytes, Bytes]:
    """Return the weights of `kinds_of_pair`."""
    dtype, new, old = kinds_of_pair(sequence, group, apart)
    return dtype, new["model"], old["model"]


# -- Pairs ---------------------------------------------------------------------------------------------------


class Stored:
    """A codec of Penstock's, block by block into memory."""

    def __init__(self, codec: Codec, dtype: DType, nbytes: int) -> None:
        self.name = f"penstock {codec.name}"
        self.codec = codec
        self.dtype = dtype
        self.blocks = list(blocks_of(nbytes, dtype))
        self.out = np.zeros(nbytes + SLACK_BYTES, np.uint8)

    def pairs(self, values: Bytes, reference: Bytes | None) -> Iterator[Pair]:
        for block in self.blocks:
            yield Pair(values[block], self.dtype, None if reference is None else reference[block])

    def encode(self, values: Bytes, reference: Bytes | None) -> list[tuple[Kind, Bytes]]:
        coder: Coder = self.codec.coder(lambda: self.pairs(values, reference))
        encoded, place = [], 0
        for pair in self.pairs(values, reference):
            out = self.out[place : place + pair.values.size + SLACK_BYTES]
            kind, payload = encode_block(coder, pair, out)
            encoded.append((kind, payload))
            place += payload.size
        return encoded

    def size(self, encoded: list[tuple[Kind, Bytes]]) -> int:
        return sum(payload.size for _, payload in encoded)

    def decode(self, encoded: list[tuple[Kind, Bytes]], reference: Bytes | None, out: Bytes) -> None:
        for block, (kind, payload) in zip(self.blocks, encoded, strict=True):
            decode_block(
                kind, payload, self.dtype, None if reference is None else reference[block], out[block]
            )

    def entropy_bytes(self, values: Bytes, reference: Bytes, encoded: list[tuple[Kind, Bytes]]) -> float:
        """Return what a perfect coder of the same symbols would make of the blocks; stored ones are what they are."""
        pairs = zip(self.pairs(values, reference), encoded, strict=True)
        coded = (Kind.PLANE, Kind.DIFFERENCE)
        return sum(
            model_bits(pair, kind, payload) / 8 if kind in coded else payload.size
            for pair, (kind, payload) in pairs
        )


def encode_block(coder: Coder, pair: Pair, out: Bytes) -> tuple[Kind, Bytes]:
    """Return a block's kind and its bytes, which are the beginning of `out`."""
    kind, length = coder.encode(pair, out)
    if kind == Kind.STORED:  # the values are the block, and must be kept as any other
        out[:length] = pair.values
    return kind, out[:length]


@dataclass
class Row:
    """A codec on a pair.

    rates_in, rates_out: GB of weights per second of processor time, by round. of_entropy: its size over what an ideal
        coder of its own model would need, for Penstock's own codecs.
    """

    name: str
    share: float
    of_entropy: float | None = None
    rates_in: list[float] = field(default_factory=list)
    rates_out: list[float] = field(default_factory=list)

    @property
    def rate_in(self) -> float:
        """Return the median."""
        return float(np.median(self.rates_in))

    @property
    def rate_out(self) -> float:
        """Return the median."""
        return float(np.median(self.rates_out))


@dataclass(frozen=True)
class Result:
    """All codecs on a pair."""

    pair: str
    dtype: DType
    rows: dict[str, Row]


def time_pair(name: str, dtype: DType, values: Bytes, reference: Bytes, rounds: int) -> Result:
    """Check and time all codecs on a pair, in turn; print a table."""
    nbytes = values.size
    others, missing = peers(dtype, nbytes)
    contenders: list[Contender] = [
        MemoryCopy(nbytes),
        Stored(CONTEXT_FREE, dtype, nbytes),
        *(Stored(codec_named(name), dtype, nbytes) for name in (*PRESETS, "dynrle", "rle4", *SLOW)),
        *others,
    ]
    out, before = np.zeros(nbytes, np.uint8), (values.copy(), reference.copy())
    rows: dict[str, Row] = {}
    for contender in contenders:  # the answers; the first call of everything
        encoded = contender.encode(values, reference)
        out[:] = 0
        contender.decode(encoded, reference, out)
        assert np.array_equal(out, values), f"{contender.name} gives back other bits on {name}"
        assert np.array_equal(values, before[0]), f"{contender.name} changes the values"
        assert np.array_equal(reference, before[1]), f"{contender.name} changes the reference"
        row = rows[contender.name] = Row(contender.name, contender.size(encoded) / nbytes)
        if isinstance(contender, Stored) and contender.codec.name in PRESETS:
            row.of_entropy = contender.size(encoded) / contender.entropy_bytes(values, reference, encoded)
    shuffle = random.Random(0)
    for index in range(rounds):
        shuffle.shuffle(contenders)
        for contender in contenders:
            if index and contender.name.endswith(SLOW):
                continue
            row = rows[contender.name]
            begin = time.process_time()
            encoded = contender.encode(values, reference)
            middle = time.process_time()
            contender.decode(encoded, reference, out)
            end = time.process_time()
            row.rates_in.append(nbytes / max(middle - begin, 1e-9) / 1e9)
            row.rates_out.append(nbytes / max(end - middle, 1e-9) / 1e9)

    print(f"\n{name}: {nbytes / 1e6:.1f} MB of {dtype.name}")
    if missing:
        print(f"not installed, see set_up_peers.sh: {', '.join(missing)}")
    print(f"{'':40}{'share':>8}{'in GB/s':>10}{'p10':>7}{'p90':>7}{'out GB/s':>11}{'p10':>7}{'p90':>7}")
    for row in rows.values():
        low_in, high_in = np.percentile(row.rates_in, [10, 90])
        low_out, high_out = np.percentile(row.rates_out, [10, 90])
        print(
            f"{row.name:40}{row.share:8.4f}{row.rate_in:10.2f}{low_in:7.2f}{high_in:7.2f}"
            f"{row.rate_out:11.2f}{low_out:7.2f}{high_out:7.2f}"
        )
    return Result(name, dtype, rows)


# -- Distances -------------------------------------------------------------------------------------------------


def compare_distances(found: list[sequences.Sequence]) -> None:
    """Print shares by how far apart the snapshots of a pair are, and how many blocks are larger as differences."""
    print(
        f"\nDistances: shares of {QUICK}, DynRLE and zipnn, weights; blocks larger as a difference, whole states"
    )
    print(f"{'':24}{'steps':>6}{QUICK:>9}{'dynrle':>9}{'of it':>9}{'zipnn':>9}{'of it':>9}{'larger':>16}")
    ratios: dict[int, list[tuple[float, float]]] = {}
    for sequence in found:
        for group in sequences.GROUPS:
            distances = [apart for apart in (1, 2, 4, 9) if apart < len(sequence.group(group))]
            for apart in distances:
                dtype, values, reference = weights_of_pair(sequence, group, apart)
                ours, dynrle, zipnn = shares_of_pair(dtype, values, reference)
                name = f"{sequence.name} {group}"
                larger = (
                    "{} of {}".format(*count_larger(*kinds_of_pair(sequence, group))) if apart == 1 else ""
                )
                print(
                    f"{name:24}{apart * sequence.unit:6}{ours:9.4f}{dynrle:9.4f}{ours / dynrle:9.3f}"
                    f"{zipnn:9.4f}{ours / zipnn:9.3f}{larger:>16}"
                )
                ratios.setdefault(dtype.item_bytes, []).append((ours / dynrle, ours / zipnn))
    for item_bytes, pairs in ratios.items():
        of_dynrle, of_zipnn = zip(*pairs, strict=True)
        print(
            f"{8 * item_bytes} bits: {min(of_dynrle):.3f} to {max(of_dynrle):.3f} of DynRLE, "
            f"{min(of_zipnn):.3f} to {max(of_zipnn):.3f} of zipnn"
        )


def shares_of_pair(dtype: DType, values: Bytes, reference: Bytes) -> tuple[float, float, float]:
    """Return the shares of `speed`, of DynRLE and of zipnn; NaN where that is not installed."""
    ours = (Stored(codec_named(name), dtype, values.size) for name in (QUICK, "dynrle"))
    theirs = [peer for peer in peers(dtype, values.size)[0] if peer.name.startswith("zipnn")]
    contenders: list[Contender] = [*ours, *theirs]
    quick, dynrle, *zipnn = (one.size(one.encode(values, reference)) / values.size for one in contenders)
    return quick, dynrle, zipnn[0] if zipnn else math.nan


def count_larger(dtype: DType, new: dict[str, Bytes], old: dict[str, Bytes]) -> tuple[int, int]:
    """Return how many blocks of a state any preset makes larger as a difference than alone, and of how many."""
    larger = total = 0
    for preset in PRESETS:
        for kind, values in new.items():
            one = Stored(codec_named(preset), dtype, values.size)
            # Both lie in the same memory: sizes are taken before the next.
            beside = [payload.size for _, payload in one.encode(values, old[kind])]
            alone = [payload.size for _, payload in one.encode(values, None)]
            larger += sum(with_it > without for with_it, without in zip(beside, alone, strict=True))
            total += len(alone)
    return larger, total


# -- Whole states ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class States:
    """Shares of a group's snapshots with their optimizer state, by codec."""

    group: str
    dtype: DType
    shares: dict[str, float]


def compare_states(sequence: sequences.Sequence, group: str) -> States:
    """Encode a group's whole states, progressive; print the shares."""
    codecs = ("dynrle", *PRESETS)
    sizes = dict.fromkeys(codecs, 0)
    by_kind: dict[str, dict[str, int]] = {codec: {} for codec in codecs}
    complete: dict[str, int] = {}
    before: dict[str, Bytes] = {}
    snapshots = sequence.group(group)[:SNAP_DIS]
    for index, snapshot in enumerate(snapshots):
        dtype, kinds = kinds_of(sequence, snapshot)
        alone = reference_of("progressive", index, SNAP_DIS) is None
        for codec in codecs:
            for kind, size in state_sizes(codec, dtype, kinds, {} if alone else before).items():
                by_kind[codec][kind] = by_kind[codec].get(kind, 0) + size
                sizes[codec] += size
        for kind, data in kinds.items():
            complete[kind] = complete.get(kind, 0) + data.size
        before = kinds
    total = sum(complete.values())
    print(
        f"\n{sequence.name} {group}: {len(snapshots)} whole states of {total / len(snapshots) / 1e6:.1f} MB, "
        f"progressive, snap_dis {SNAP_DIS}"
    )
    print(f"{'':40}{'share':>8}  " + "".join(f"{kind:>16}" for kind in complete))
    for codec in codecs:
        parts = "".join(f"{by_kind[codec][kind] / complete[kind]:16.4f}" for kind in complete)
        print(f"{'penstock ' + codec:40}{sizes[codec] / total:8.4f}  {parts}")
    shares = {codec: size / total for codec, size in sizes.items()}
    return States(f"{sequence.name} {group}", dtype, shares)


def state_sizes(
    codec_name: str, dtype: DType, kinds: dict[str, Bytes], references: dict[str, Bytes]
) -> dict[str, int]:
    """Return the encoded size of each kind of a state, under one coder for all; checks that it decodes."""
    codec = codec_named(codec_name)

    def pairs() -> Iterator[tuple[str, Pair]]:
        for kind, values in kinds.items():
            reference = references.get(kind)
            for block in blocks_of(values.size, dtype):
                yield kind, Pair(values[block], dtype, None if reference is None else reference[block])

    coder = codec.coder(lambda: (pair for _, pair in pairs()))
    sizes = dict.fromkeys(kinds, 0)
    space = max(values.size for values in kinds.values()) + SLACK_BYTES
    out, back = np.zeros(space, np.uint8), np.zeros(space, np.uint8)
    for kind, pair in pairs():
        stored_as, payload = encode_block(coder, pair, out[: pair.values.size + SLACK_BYTES])
        decode_block(stored_as, payload, dtype, pair.reference, back[: pair.values.size])
        assert np.array_equal(back[: pair.values.size], pair.values), f"{codec_name} gives back other bits"
        sizes[kind] += payload.size
    return sizes


# -- The paper's methods ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Shares of the paper's methods, the chain's deltas by snap_dis, and Huffman-coded baselines."""

    group: str
    shares: dict[str, float]
    chain_deltas: dict[int, float]
    baseline: float


def compare_methods(sequence: sequences.Sequence, group: str) -> Order:
    """Store a group's weights by each of the paper's seven methods; print the shares."""
    snapshots = sequence.group(group)[:SNAP_DIS]
    weights = []
    for snapshot in snapshots:
        dtype, kinds = kinds_of(sequence, snapshot)
        weights.append(kinds["model"])
    complete = weights[0].size

    def share(codec: str, snapshot: int, reference: int | None) -> float:
        references = {} if reference is None else {"model": weights[reference]}
        return sum(state_sizes(codec, dtype, {"model": weights[snapshot]}, references).values()) / complete

    def shares_of(codec: str, scheme: Scheme, snap_dis: int) -> list[tuple[int | None, float]]:
        references = [reference_of(scheme, index, snap_dis) for index in range(len(weights))]
        return [(reference, share(codec, index, reference)) for index, reference in enumerate(references)]

    codec_of = {"complete": "stored", "dynrle-progressive": "dynrle", "dynrle-chain": "dynrle"}
    runs = {
        method.name: shares_of(codec_of.get(method.name, method.name), method.scheme, SNAP_DIS)
        for method in METHODS
    }
    shares = {name: float(np.mean([part for _, part in run])) for name, run in runs.items()}
    distances = [distance for distance in (3, 5, 10) if distance <= len(weights)] or [len(weights)]
    deltas = {
        distance: float(
            np.mean(
                [part for reference, part in shares_of("dynrle", "chain", distance) if reference is not None]
            )
        )
        for distance in distances
    }
    baseline = float(np.mean([share("dynrle", index, None) for index in range(len(weights))]))
    print(
        f"\n{sequence.name} {group}: the paper's methods on {len(weights)} snapshots of the weights, snap_dis 10"
    )
    for method in METHODS:
        print(f"{method.label:40}{shares[method.name]:8.4f}")
    listed = ", ".join(f"{part:.4f} at {distance}" for distance, part in deltas.items())
    print(f"chain's deltas by snap_dis: {listed}; baselines (Huffman-coded exponents): {baseline:.4f}")
    return Order(f"{sequence.name} {group}", shares, deltas, baseline)


# -- Two threads -----------------------------------------------------------------------------------------------

#: Of a round's time: what its threads may have waited for a processor in one that counts.
MOST_WAITED = 0.02
#: So many rounds at most for each one that is to count.
MOST_TRIES = 20
#: Of a round, some 10 ms: the longer it is, the fewer are undisturbed.
MOST_BLOCKS = 64


@dataclass(frozen=True)
class Stretch:
    """What a thread did of a round. begin, end: on the wall clock, in seconds.

    processor_seconds: of this thread alone. waited_seconds: that it was ready and another ran in its place.
    """

    begin: float
    end: float
    processor_seconds: float
    waited_seconds: float


def run_stretch(work: Callable[[range], None], share: range) -> Stretch:
    """Do a share of a round's work."""
    waited, processor, begin = waited_seconds(), time.thread_time(), time.perf_counter()
    work(share)
    end, processor_end = time.perf_counter(), time.thread_time()
    return Stretch(begin, end, processor_end - processor, waited_seconds() - waited)


def waited_seconds() -> float:
    """Return how long the calling thread waited for a processor so far, from a beginning of its own.

    Linux counts just that. Elsewhere it is all the time in which the thread did not run, waits for a lock included.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return time.perf_counter() - time.thread_time()


def is_undisturbed(stretches: Sequence[Stretch]) -> bool:
    """Return whether all threads of a round had a processor each, from its beginning on."""
    begin = min(one.begin for one in stretches)
    seconds = max(one.end for one in stretches) - begin
    return all(one.waited_seconds + one.begin - begin <= MOST_WAITED * seconds for one in stretches)


@dataclass
class Scaling:
    """Two threads against one. gains: how many times as fast, in each round in which no other process was in the way.

    costs: processor time of both over that of one, in every round: what they take from each other's caches and memory.
    """

    gains: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def add(self, alone: Stretch, both: Sequence[Stretch]) -> None:
        """Count a round."""
        self.costs.append(sum(one.processor_seconds for one in both) / max(alone.processor_seconds, 1e-9))
        if is_undisturbed([alone]) and is_undisturbed(both):
            seconds = max(one.end for one in both) - min(one.begin for one in both)
            self.gains.append((alone.end - alone.begin) / seconds)

    @property
    def gain(self) -> float | None:
        """Return the median; None if every round was disturbed."""
        return float(np.median(self.gains)) if self.gains else None

    def __str__(self) -> str:
        told = "no time" if self.gain is None else f"{self.gain:.2f}"
        cost = f"processor time {np.median(self.costs):.3f} x one's"
        return f"{told} in {len(self.gains)} of {len(self.costs)} rounds undisturbed, {cost} in all"


def two_threads(dtype: DType, values: Bytes, reference: Bytes, rounds: int) -> dict[str, Scaling]:
    """Return how many times as fast two threads are as one, by preset and direction; print it.

    Rounds in which a thread waited for a processor say how busy the machine is, and do not count: more are run.
    """
    found: dict[str, Scaling] = {}
    blocks = list(blocks_of(values.size, dtype))[:MOST_BLOCKS]
    outs = [np.zeros(block.stop - block.start + SLACK_BYTES, np.uint8) for block in blocks]
    back = np.zeros(values.size, np.uint8)
    everything, halves = range(len(blocks)), (range(0, len(blocks), 2), range(1, len(blocks), 2))
    together = Barrier(2)

    def run_beside(work: Callable[[range], None], share: range) -> Stretch:
        together.wait()
        return run_stretch(work, share)

    with ThreadPoolExecutor(2) as pool:
        for preset in PRESETS:
            pairs = [Pair(values[block], dtype, reference[block]) for block in blocks]
            coder = codec_named(preset).coder(lambda pairs=pairs: iter(pairs))  # type: ignore[misc]
            kinds = [encode_block(coder, pair, out) for pair, out in zip(pairs, outs, strict=True)]

            def encode(share: range, coder: Coder = coder, pairs: list[Pair] = pairs) -> None:
                for index in share:
                    encode_block(coder, pairs[index], outs[index])

            def decode(share: range, kinds: list[tuple[Kind, Bytes]] = kinds) -> None:
                for index in share:
                    block, (kind, payload) = blocks[index], kinds[index]
                    decode_block(kind, payload, dtype, reference[block], back[block])

            for direction, work in (("in", encode), ("out", decode)):
                scaling = found[f"{preset} {direction}"] = Scaling()
                list(pool.map(run_beside, (work, work), halves))  # both threads have their scratch
                while len(scaling.gains) < rounds and len(scaling.costs) < MOST_TRIES * rounds:
                    alone = run_stretch(work, everything)
                    scaling.add(alone, list(pool.map(run_beside, (work, work), halves)))
    print("\nTwo threads against one, wall clock, median:")
    for name, scaling in found.items():
        print(f"{name:40}{scaling}")
    return found


# -- Targets -----------------------------------------------------------------------------------------------------


def print_targets(
    results: list[Result], states: list[States], orders: list[Order], scaling: dict[str, Scaling]
) -> None:
    """Print each target with what was measured, and whether it is met."""
    print("\nTargets")

    def told(met: bool, text: str) -> None:
        print(f"  {'met    ' if met else 'NOT MET'}  {text}")

    for result in results:
        rows = result.rows
        ours = {preset: rows[f"penstock {preset}"] for preset in PRESETS}
        quick = [row for row in ours.values() if row.rate_in >= 2.0 and row.rate_out >= 1.8]
        fast = min(quick, key=lambda row: row.share, default=None)
        free, context = rows[f"penstock {CONTEXT_FREE.name}"], ours[WITH_CONTEXTS]
        dynrle, zipnn = rows["penstock dynrle"], rows.get("zipnn 0.5.4, delta mode")
        print(f"  {result.pair}")
        if result.dtype.item_bytes == 4:
            best = fast or ours[QUICK]
            speed = f"{best.name} {best.rate_in:.2f} GB/s in, {best.rate_out:.2f} out"
            ratio = best.share / dynrle.share
            told(
                fast is not None and ratio <= 0.885,
                f"{ratio:.3f} x DynRLE, at most 0.885 at 2 and 1.8 GB/s; {speed}",
            )
            if zipnn:
                ratio = best.share / zipnn.share
                told(
                    fast is not None and ratio <= 0.935,
                    f"{ratio:.3f} x zipnn, at most 0.935 at 2 and 1.8 GB/s; {speed}",
                )
        elif zipnn and result.pair.endswith("late"):
            best = min(ours.values(), key=lambda row: row.share)
            ratio = best.share / zipnn.share
            told(ratio <= 0.6, f"{ratio:.3f} x zipnn, at most 0.6; {best.name} {best.rate_in:.2f} GB/s in")
        ratio = context.share / free.share
        told(
            ratio <= 0.98 and context.rate_in >= 1.0,
            f"contexts: {ratio:.3f} x without, at most 0.98 at 1 GB/s; {context.rate_in:.2f} GB/s in",
        )
        worst = max(ours.values(), key=lambda row: row.of_entropy or 0.0)
        told(
            (worst.of_entropy or 0.0) <= 1.02,
            f"{worst.of_entropy:.4f} x the entropy of its own model, at most 1.02; {worst.name}",
        )
        told(*ahead_of_peers(rows, list(ours.values())))
    for state in states:
        bound = 0.89 if state.dtype.item_bytes == 4 else 0.68
        preset = min(PRESETS, key=lambda preset: state.shares[preset])
        ratio = state.shares[preset] / state.shares["dynrle"]
        told(
            ratio <= bound,
            f"{state.group}, whole state: {ratio:.3f} x the paper's scheme, at most {bound}; {preset}",
        )
    for name, two in scaling.items():
        told(two.gain is not None and two.gain >= 1.8, f"two threads, {name}: at least 1.8 x one; {two}")
    paper = ("complete", "gzip", "gzip-delta", "rle4", "rle4-gzip", "dynrle-progressive")
    for order in orders:
        falling = [order.shares[name] for name in paper]
        told(
            falling == sorted(falling, reverse=True), f"{order.group}: the paper's order {' > '.join(paper)}"
        )
        growing = list(order.chain_deltas.values())
        told(growing == sorted(growing), f"{order.group}: chain's deltas grow with snap_dis")
        told(abs(order.baseline - 0.83) <= 0.03, f"{order.group}: baselines {order.baseline:.3f}, near 0.83")


def ahead_of_peers(rows: dict[str, Row], ours: list[Row]) -> tuple[bool, str]:
    """Return whether each peer has a smaller preset of ours of like speed, and what comes nearest to having none."""
    closest, ratio = "none is installed", 0.0
    quicker = []
    for peer in rows.values():
        if peer.name.startswith(("penstock", "limit")):
            continue
        like = [row for row in ours if row.rate_in >= LIKE_SPEED * peer.rate_in]
        best = min(like or ours, key=lambda row: row.share)
        of_peer = best.share / peer.share
        rates = (
            f"{best.name}, {best.rate_in / peer.rate_in:.2f} x in, {best.rate_out / peer.rate_out:.2f} x out"
        )
        if not like:
            quicker.append(f"{peer.name} ({of_peer:.3f} x its share, {rates})")
        elif of_peer > ratio:
            closest, ratio = f"{peer.name}, {of_peer:.3f} x its share; {rates}", of_peer
    text = f"ahead of every peer of like speed; the closest is {closest}"
    if quicker:
        text += f"; quicker than any preset: {', '.join(quicker)}"
    return ratio < 1.0 and not quicker, text


#: By the beginning of a name: what the picture calls it, and draws it with.
FAMILIES = {
    "penstock dynrle": ("the paper's", "ORANGE", "s"),
    "penstock rle4": ("the paper's", "ORANGE", "s"),
    "penstock gzip": ("the paper's", "ORANGE", "s"),
    "penstock": ("Penstock's own", "BLUE", "o"),
    "zipnn": ("zipnn, delta mode", "GREEN", "D"),
    "pcodec": ("pcodec, difference", "PURPLE", "^"),
    "blosc2": ("blosc2", "SKY", "v"),
    "byte planes": ("byte planes + zstd (BitX)", "RED", "P"),
    "zstd": ("zstd, raw", "FAINT", "x"),
}


def draw(results: list[Result], path: Path) -> None:
    """Draw the share of each codec against its speed in, a picture for each pair."""
    from penstock.measure import picture

    columns = len(sequences.GROUPS)
    lines = -(-len(results) // columns)
    figure = picture.new_figure(4.2 * columns, 3.0 * lines + 0.6)
    drawn: dict[str, Any] = {}
    for axes, result in zip(figure.subplots(lines, columns, squeeze=False).flat, results, strict=True):
        picture.style_axes(axes)
        picture.name_axes(axes, result.pair)
        for row in result.rows.values():
            beginning = next((name for name in FAMILIES if row.name.startswith(name)), None)
            if beginning is None or row.name.endswith(CONTEXT_FREE.name):
                continue
            label, colour, marker = FAMILIES[beginning]
            (drawn[label],) = axes.plot(
                row.rate_in,
                row.share,
                marker,
                color=getattr(picture.Colour, colour),
                ms=9 if label == "Penstock's own" else 5,
            )
        axes.set_xscale("log")
        axes.set_xlim(0.01, 10.0)
        axes.set_xlabel("GB/s in, one core")
        axes.set_ylabel("share of the complete size")
        axes.set_ylim(0.0, 1.0)
    figure.legend(
        list(drawn.values()), list(drawn), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    picture.save_picture(figure, path)


if __name__ == "__main__":
    main()
