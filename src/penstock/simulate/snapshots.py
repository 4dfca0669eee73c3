"""Snapshots by their sizes, under the seven ways of storing them that the delta-snapshot paper compares.

Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots",
Journal of Parallel and Distributed Computing 133, 2019: "the paper" below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Any, Literal, get_args

from penstock.errors import ConfigError, FormatError
from penstock.machine.ssd import Drive
from penstock.policy.delta_schemes import Scheme, needed_to_restore, needed_to_save, reference_of
from penstock.simulate.wear import (
    DeleteFile,
    Operation,
    Phase,
    ReadFile,
    Stream,
    WearResult,
    WriteFile,
    run_stream,
)

#: "penstock": by the codec that `penstock.checkpoint` uses where nobody chose.
Baseline = Literal["complete", "gzip", "huffman", "penstock"]
Delta = Literal["gzip", "rle4", "rle4_gzip", "dynrle", "penstock"]
_BASELINES: tuple[Baseline, ...] = get_args(Baseline)
_DELTAS: tuple[Delta, ...] = get_args(Delta)
_FORMAT = "penstock snapshot sizes 1"

#: Distances between two baselines that the paper compares.
SNAP_DISTANCES = (3, 5, 10)
#: The one at which it prints times, in Table 9.
TIMED_SNAP_DIS = 5


@dataclass(frozen=True, slots=True)
class Method:
    """A way of storing snapshots.

    scheme: to what a snapshot is stored as a difference, see `penstock.policy.delta_schemes`.
    baseline, delta: how each kind is stored.
    """

    name: str
    label: str
    scheme: Scheme
    baseline: Baseline
    delta: Delta | None = None


#: The seven of Figures 9 and 10, in their order. RLE(4) leaves its baselines as they are; gzip on top takes them too.
METHODS = (
    Method("complete", "complete", "complete", "complete"),
    Method("gzip", "GZIP + complete", "complete", "gzip"),
    Method("gzip-delta", "GZIP + delta", "progressive", "gzip", "gzip"),
    Method("rle4", "RLE(4)", "progressive", "complete", "rle4"),
    Method("rle4-gzip", "RLE(4) + GZIP", "progressive", "gzip", "rle4_gzip"),
    Method("dynrle-progressive", "DynRLE, progressive", "progressive", "huffman", "dynrle"),
    Method("dynrle-chain", "DynRLE, chain", "chain", "huffman", "dynrle"),
)

#: Penstock's own default, to be compared with them.
OWN_METHOD = Method("penstock", "Penstock", "progressive", "penstock", "penstock")


def method_named(name: str) -> Method:
    """Return a method. Raises: ConfigError listing the known names."""
    known_methods = (*METHODS, OWN_METHOD)
    for method in known_methods:
        if method.name == name:
            return method
    known = ", ".join(method.name for method in known_methods)
    raise ConfigError(f"{name!r} is no encoding; the known ones are {known}")


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotSizes:
    """The sizes of a model's snapshots, stored in several ways.

    parameters: weights of the model.
    baselines: bytes of each snapshot stored alone; None where that was not recorded.
    deltas: bytes of the difference of a snapshot to a reference, by (snapshot, reference), counted from 0.
    """

    name: str
    description: str
    parameters: int
    baselines: Mapping[Baseline, tuple[int | None, ...]]
    deltas: Mapping[Delta, Mapping[tuple[int, int], int]]

    @property
    def count(self) -> int:
        """Return how many snapshots there are."""
        return len(self.baselines["complete"])

    def scaled(self, parameters: int) -> SnapshotSizes:
        """Return the sizes of a model that much larger whose weights compress alike.

        Every size grows by the same factor, rounded up to a byte. An assumption: how well weights compress depends
        on the model and on how it is trained far more than on how many there are, but no small model is a large one.
        """
        if parameters < 1:
            raise ConfigError(f"parameters is {parameters}; a model has at least 1")
        factor = Fraction(parameters, self.parameters)

        def grown(size: int) -> int:
            return -int(-size * factor // 1)

        return SnapshotSizes(
            self.name,
            self.description,
            parameters,
            {
                codec: tuple(None if size is None else grown(size) for size in sizes)
                for codec, sizes in self.baselines.items()
            },
            {
                codec: {pair: grown(size) for pair, size in sizes.items()}
                for codec, sizes in self.deltas.items()
            },
        )

    def stored_bytes(self, method: Method, snap_dis: int) -> list[int] | None:
        """Return what each snapshot's own file takes, or None where a size was not recorded.

        snap_dis: snapshots from one baseline to the next, at least 1.
        """
        sizes: list[int] = []
        for snapshot in range(self.count):
            reference = reference_of(method.scheme, snapshot, snap_dis)
            if method.delta is None or reference is None:
                size = self.baselines[method.baseline][snapshot]
            else:
                size = self.deltas[method.delta].get((snapshot, reference))
            if size is None:
                return None
            sizes.append(size)
        return sizes


# -- What a training does to the drive -------------------------------------------------------------------


def snapshot_stream(
    sizes: SnapshotSizes, method: Method, snap_dis: int, *, with_restores: bool = False
) -> Stream:
    """Return the stream of a training that saves every snapshot.

    Only what the newest snapshot needs is kept. What is not needed any more is deleted once the new file is
    written, never before: Algorithm 2 deletes first, and would lose everything in a crash between.
    with_restores: after each save the snapshot is restored too, in a phase of its own.
    Raises: ConfigError naming the model where a size was not recorded.
    """
    stored = sizes.stored_bytes(method, snap_dis)
    if stored is None:
        raise ConfigError(
            f"{sizes.name} has no sizes recorded for {method.name} at snap_dis {snap_dis}: choose another"
        )
    operations: list[Operation] = []
    kept: list[int] = []
    for snapshot, size in enumerate(stored):
        reads = needed_to_save(method.scheme, snapshot, snap_dis)
        wanted = needed_to_restore(method.scheme, snapshot, snap_dis)
        operations.append(Phase(f"save {snapshot + 1}"))
        operations += [ReadFile(_file(read)) for read in reads]
        operations.append(WriteFile(_file(snapshot), size))
        operations += [DeleteFile(_file(old)) for old in kept if old not in wanted]
        if with_restores:
            operations.append(Phase(f"restore {snapshot + 1}"))
            operations += [ReadFile(_file(read)) for read in wanted]
        kept = wanted
    return Stream(f"{sizes.name}, {method.name}, snap_dis {snap_dis}", tuple(operations))


def _file(snapshot: int) -> str:
    return f"snapshot {snapshot + 1}"


# -- Recorded sizes --------------------------------------------------------------------------------------


def read_sizes(text: str, name: str) -> list[SnapshotSizes]:
    """Return the models of a JSON text, as benchmarks/snapshots/record_sizes.py writes it.

    name: of the text, for messages.
    Raises: FormatError naming the place in it.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"{name}, line {error.lineno}: it is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: it is not JSON that can be read: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FormatError(f"{name}: its format is {found!r}; sizes of snapshots begin with {_FORMAT!r}")
    models = data.get("models")
    if not isinstance(models, list) or not models:
        raise FormatError(f"{name}: models is {models!r:.80}; it must be a list of at least one")
    found_models = []
    for index, model in enumerate(models):
        try:
            found_models.append(_read_model(model))
        except ConfigError as error:
            raise FormatError(f"{name}: models[{index}]{error}") from None
    return found_models


def _read_model(model: Any) -> SnapshotSizes:
    if not isinstance(model, dict):
        raise ConfigError(f" is {model!r:.80}; it must be an object")
    name = model.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f".name is {name!r:.80}; it must be text")
    parameters = _whole(model.get("parameters"), ".parameters")
    complete = _sizes(model, "complete_bytes", None)
    if None in complete:
        raise ConfigError(".complete_bytes has a gap: the complete size of every snapshot is needed")
    baselines: dict[Baseline, tuple[int | None, ...]] = {
        codec: _sizes(model, f"{codec}_bytes", len(complete)) for codec in _BASELINES
    }
    deltas: dict[Delta, dict[tuple[int, int], int]] = {codec: {} for codec in _DELTAS}
    listed = model.get("deltas", [])
    if not isinstance(listed, list):
        raise ConfigError(f".deltas is {listed!r:.80}; it must be a list")
    for index, delta in enumerate(listed):
        place = f".deltas[{index}]"
        if not isinstance(delta, dict):
            raise ConfigError(f"{place} is {delta!r:.80}; it must be an object")
        snapshot, reference = (
            _whole(delta.get(field), f"{place}.{field}", least=0) for field in ("snapshot", "reference")
        )
        if not reference < snapshot < len(complete):
            raise ConfigError(
                f"{place} is of snapshot {snapshot} to {reference}; of {len(complete)} snapshots, counted from 0, "
                "one refers to an earlier one"
            )
        for codec in _DELTAS:
            if f"{codec}_bytes" in delta:
                size = _whole(delta[f"{codec}_bytes"], f"{place}.{codec}_bytes")
                deltas[codec][snapshot, reference] = size
    return SnapshotSizes(name, str(model.get("description", "")), parameters, baselines, deltas)


def _sizes(model: Mapping[str, Any], field: str, count: int | None) -> tuple[int | None, ...]:
    listed = model.get(field, [None] * (count or 0))
    if not isinstance(listed, list) or not listed or (count is not None and len(listed) != count):
        length = "at least one size" if count is None else f"{count} sizes"
        raise ConfigError(f".{field} is {listed!r:.80}; it must be a list of {length}")
    return tuple(
        None if size is None else _whole(size, f".{field}[{index}]") for index, size in enumerate(listed)
    )


def _whole(value: Any, place: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{place} is {value!r:.80}; it must be an integer of at least {least}")
    return value


def recorded_sizes() -> list[SnapshotSizes]:
    """Return the sizes that come with the package: two small models, trained for the purpose."""
    text = (resources.files("penstock.simulate") / "recorded_sizes.json").read_text("utf-8")
    return read_sizes(text, "recorded_sizes.json")


# -- Comparisons -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StoredRun:
    """A training's snapshots under one method, run on a drive.

    stored_bytes: of all snapshots, as the method stores them; None, and no result, where sizes were not recorded.
    """

    sizes: SnapshotSizes
    method: Method
    snap_dis: int
    stored_bytes: int | None
    stream: Stream | None
    result: WearResult | None


def compare_methods(
    drive: Drive,
    models: Sequence[SnapshotSizes],
    methods: Sequence[Method] = METHODS,
    snap_distances: Sequence[int] = SNAP_DISTANCES,
    *,
    repeats: int = 1,
    done: Callable[[int], None] = lambda _: None,
) -> list[StoredRun]:
    """Run every model's snapshots under every method at every distance, each on a copy of the drive.

    repeats: how many trainings follow each other on it. done: called with how many of the runs are done.
    Returns: in the order of models, then distances, then methods: Figures 9 and 10.
    """
    runs: list[StoredRun] = []
    used = drive.copy()
    for sizes in models:
        for snap_dis in snap_distances:
            for method in methods:
                stored = sizes.stored_bytes(method, snap_dis)
                if stored is None:
                    runs.append(StoredRun(sizes, method, snap_dis, None, None, None))
                else:
                    stream = snapshot_stream(sizes, method, snap_dis)
                    used.become(drive)
                    result = run_stream(used, stream, repeats=repeats)
                    runs.append(StoredRun(sizes, method, snap_dis, sum(stored), stream, result))
                done(len(runs))
    return runs


@dataclass(frozen=True, slots=True)
class SnapshotTimes:
    """What a snapshot takes while it is the newest.

    snapshot: counted from 0. useful_pages: of all files that it needs. save_seconds, restore_seconds: of the drive.
    """

    snapshot: int
    useful_pages: int
    save_seconds: float
    restore_seconds: float


def time_snapshots(
    drive: Drive, sizes: SnapshotSizes, method: Method, snap_dis: int, *, phases_from_start: bool = True
) -> list[SnapshotTimes]:
    """Save and restore every snapshot on a copy of a drive, as Table 9 has it.

    phases_from_start: as in `run_stream`.
    Raises: ConfigError naming the model where a size was not recorded.
    """
    stream = snapshot_stream(sizes, method, snap_dis, with_restores=True)
    result = run_stream(drive.copy(), stream, phases_from_start=phases_from_start)
    pages = [drive.ssd.pages(size) for size in sizes.stored_bytes(method, snap_dis) or ()]
    return [
        SnapshotTimes(
            snapshot,
            sum(pages[file] for file in needed_to_restore(method.scheme, snapshot, snap_dis)),
            save.seconds,
            restore.seconds,
        )
        for snapshot, (save, restore) in enumerate(zip(result.phases[0::2], result.phases[1::2], strict=True))
    ]
