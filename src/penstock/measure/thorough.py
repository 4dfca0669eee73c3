"""Measuring all places of a machine in a minute: ten runs of each, their medians and how sure these are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.flow.cpus import available_cpus
from penstock.machine import Curve, Machine, StorageClass
from penstock.measure.calibrate import Calibration, measure_machine, shown
from penstock.measure.file_rates import REPEATS, FileRates, MeasuredCurve, measure_files
from penstock.measure.in_threads import Clock
from penstock.measure.memory_rates import measure_memory
from penstock.measure.rank_rates import RankRates, measure_ranks
from penstock.measure.spread import Spread
from penstock.ranks import Ranks, alone
from penstock.store import Source
from penstock.units import format_bytes, format_count, format_rate

MINUTE = 60.0
# How the time is shared out between what is measured.
_SOURCE_PARTS, _MEMORY_PARTS, _FOLDER_PARTS, _RANKS_PARTS = 2.0, 0.5, 2.0, 2.0
#: Of a disk's free space, what its tier may take.
_CAPACITY_SHARE = 0.9
#: A number of threads is enough that reaches so much of what the best one does.
_ENOUGH = 0.95


@dataclass(frozen=True, slots=True)
class ThoroughCalibration:
    """A machine, and the curves that it was made from.

    base: of the source's samples. copies, memory: of memory; the machine has the copies. disks: of local disks, in the
    order given. shared: of a folder next to the source, None where none was given. ranks: None where there is one rank.
    """

    machine: Machine
    base: Calibration
    copies: MeasuredCurve
    memory: tuple[MeasuredCurve, ...]
    disks: tuple[FileRates, ...]
    shared: FileRates | None
    ranks: RankRates | None

    def to_toml(self) -> str:
        """Return the machine's TOML under a comment that says what was measured, and how far to trust it."""
        lines = [*_file_lines(self.disks, self.shared), *_rank_lines(self.ranks)]
        return replace(self.base, machine=self.machine).to_toml(lines)

    def places(self) -> list[tuple[str, Sequence[MeasuredCurve]]]:
        """Return what was measured, by place: memory, the disks, the folder next to the source, the samples."""
        found: list[tuple[str, Sequence[MeasuredCurve]]] = [("memory", self.memory)]
        found += [(each.folder, each.curves) for each in self.disks]
        found += [(self.shared.folder, self.shared.curves)] if self.shared else []
        return [*found, ("samples of the source", self.base.curves)]

    def to_json(self) -> dict[str, Any]:
        """Return all curves and maxima: bytes/s by number of threads, median and interval."""
        results: list[dict[str, Any]] = [
            {"place": place, "access": curve.access.label, "threads": count, **_spread(spread)}
            for place, curves in self.places()
            for curve in curves
            for count, spread in curve.points
        ]
        for each in (*self.disks, *([self.shared] if self.shared else [])):
            if each.maximum is not None:
                about = {"place": each.folder, "file_bytes": each.maximum.file_bytes}
                results.append({**about, "access": "sequential maximum, read", **_spread(each.maximum.read)})
                results.append(
                    {**about, "access": "sequential maximum, write", **_spread(each.maximum.write)}
                )
        if self.ranks is not None:
            for curve in (self.ranks.clients, self.ranks.sequential):
                for count, spread in curve.points:
                    about = {"place": "shared by ranks", "access": curve.access.label, "ranks": count}
                    results.append({**about, **_spread(spread)})
            results.append({"place": "network", "access": "rank to rank", **_spread(self.ranks.network)})
        return {"results": results}


def measure_thoroughly(
    source: Source,
    *,
    local_disks: Sequence[str] = (),
    shared: str | None = None,
    max_seconds: float = MINUTE,
    repeats: int = REPEATS,
    ranks: Ranks | None = None,
    progress: bool | None = None,
    clock: Clock = time.perf_counter,
) -> ThoroughCalibration | None:
    """Measure the source's samples, memory, local disks and a folder next to the source, `repeats` times each.

    local_disks: folders that a loader may keep samples in. shared: a folder on the source's file system that may be
        written to; it shows what the samples cannot: writing, reading in sequence, and several ranks at once.
    max_seconds: about; requests under way are waited for.
    ranks: of the job, of which each calls this: rank 0 measures its host, all together the shared folder.
    Returns: on rank 0; None on the others.
    Raises: as `calibrate`, and DataError for a folder that cannot be measured.
    """
    if repeats < 1:
        raise ConfigError(
            f"repeats is {repeats}; measure at least once, ten times for an interval that means something"
        )
    ranks = alone() if ranks is None else ranks
    if ranks.size > 1 and shared is None:
        raise ConfigError(
            f"{ranks.size} ranks calibrate together, and what they share is not known: name a folder on the "
            "source's file system that all may write to (shared=)"
        )
    folders = [*local_disks, *([shared] if shared else [])]
    parts = _SOURCE_PARTS + _MEMORY_PARTS + len(folders) * _FOLDER_PARTS + (ranks.size > 1) * _RANKS_PARTS
    part_seconds = max_seconds / parts
    steps = repeats * (len(folders) + (ranks.size > 1)) + len(folders) + 2
    sample_bytes = float(source.sizes_bytes.mean()) if len(source) else 0.0
    host: list[tuple[Any, ...]] = []
    with shown(progress if ranks.rank == 0 else False, steps) as report:

        def measure_host() -> int:
            host.append(_measure_host(source, folders, part_seconds, sample_bytes, repeats, clock, report))
            base, *_ = host[0]
            return int(base.machine.source.threads)

        threads = int(ranks.on_rank_zero("measuring the host of rank 0", measure_host))
        over_ranks = None
        if ranks.size > 1 and shared is not None:
            over_ranks = measure_ranks(
                ranks,
                shared,
                sample_bytes,
                threads,
                _RANKS_PARTS * part_seconds,
                clock,
                report,
                repeats=repeats,
            )
    if not host:
        return None
    base, copies, memory, rates = host[0]
    disks, beside = tuple(rates[: len(local_disks)]), rates[-1] if shared else None
    machine = machine_of(base.machine, copies, disks, beside, over_ranks, ranks.size)
    return ThoroughCalibration(machine, base, copies, memory, disks, beside, over_ranks)


def _measure_host(
    source: Source,
    folders: Sequence[str],
    part_seconds: float,
    sample_bytes: float,
    repeats: int,
    clock: Clock,
    report: Callable[[str], None],
) -> tuple[Calibration, MeasuredCurve, tuple[MeasuredCurve, ...], list[FileRates]]:
    # Folders first: what cannot be written to is reported at once.
    rates = [
        measure_files(folder, sample_bytes, _FOLDER_PARTS * part_seconds, clock, report, repeats=repeats)
        for folder in folders
    ]
    copies, memory = measure_memory(available_cpus(), _MEMORY_PARTS * part_seconds, clock, repeats)
    report("memory")
    seconds = _SOURCE_PARTS * part_seconds
    base = measure_machine(source, max_seconds=seconds, progress=False, clock=clock, repeats=repeats)
    report("samples of the source")
    return base, copies, memory, rates


def machine_of(
    base: Machine,
    copies: MeasuredCurve,
    disks: Sequence[FileRates],
    shared: FileRates | None,
    ranks: RankRates | None,
    size: int = 1,
) -> Machine:
    """Return a machine with what else was measured: memory, disks, the shared folder, the ranks."""
    storage = [replace(each, read=copies.curve) for each in base.storage]
    storage += [_disk_class(each, number, len(disks)) for number, each in enumerate(disks, 1)]
    source, network, source_network = (
        base.source,
        base.network_bytes_per_second,
        base.source_network_bytes_per_second,
    )
    if ranks is not None:
        clients = ranks.clients.curve
        source = replace(source, clients=clients, sequential=_not_below(ranks.sequential.curve, clients))
        network, source_network = _digits(ranks.network.median), _digits(ranks.source_network)
    elif shared is not None:
        best = _digits(shared.curve(is_write=False, is_random=False).best)
        sequential = Curve.flat(best)
        source = replace(
            source,
            sequential=sequential if source.clients is None else _not_below(sequential, source.clients),
        )
    if shared is not None:
        source = replace(source, write=Curve.flat(_digits(shared.curve(is_write=True, is_random=False).best)))
    return replace(
        base,
        source=source,
        storage=tuple(storage),
        ranks=size,
        network_bytes_per_second=network,
        source_network_bytes_per_second=source_network,
    )


def _disk_class(rates: FileRates, number: int, count: int) -> StorageClass:
    read, write = rates.curve(is_write=False, is_random=True), rates.curve(is_write=True, is_random=False)
    enough = next(users for users, spread in read.points if spread.median >= _ENOUGH * read.best)
    return StorageClass(
        "disk" if count == 1 else f"disk {number}",
        max(1, int(rates.free_bytes * _CAPACITY_SHARE)),
        enough,
        read.curve,
        write.curve,
        backend="filesystem",
        path=rates.folder,
    )


def _not_below(curve: Curve, least: Curve) -> Curve:
    """Return a curve that is nowhere below another one: in sequence no store is slower than at random."""
    users = sorted({users for each in (curve, least) for users, _ in each.points})
    return Curve(tuple((count, max(curve.at(count), least.at(count))) for count in users))


def _digits(rate: float) -> float:
    return float(f"{rate:.4g}")


def _spread(spread: Spread) -> Mapping[str, float]:
    return {
        "bytes_per_second": spread.median,
        "low_bytes_per_second": spread.low,
        "high_bytes_per_second": spread.high,
        "repeats": spread.repeats,
    }


def _file_lines(disks: Sequence[FileRates], shared: FileRates | None) -> list[str]:
    lines = []
    for each in (*disks, *([shared] if shared else [])):
        way = (
            "past the page cache (O_DIRECT)"
            if each.is_direct
            else "with the page cache dropped before each run"
        )
        lines.append(
            f"{each.folder} ({each.file_system or 'unknown file system'}) was read and written {way}."
        )
        if (most := each.maximum) is not None:
            lines.append(
                f"In sequence over {format_bytes(most.file_bytes)}: read {_shown_spread(most.read)}, write "
                f"{_shown_spread(most.write)}, of {most.read.repeats} passes after a first one."
            )
        for curve in each.curves:
            best = max(curve.points, key=lambda point: point[1].median)
            lines.append(
                f"{curve.access.label}: {_shown_spread(best[1])} by {format_count(best[0], 'thread')} at best"
            )
        lines += each.remarks
    return lines


def _rank_lines(ranks: RankRates | None) -> list[str]:
    if ranks is None:
        return []
    lines = [
        f"{count} ranks: {_shown_spread(spread)} of {ranks.clients.access.label}"
        for count, spread in ranks.clients.points
    ]
    lines.append(f"From rank to rank: {_shown_spread(ranks.network)}.")
    if ranks.is_one_host:
        lines.append("CAUTION: all ranks are on one host: this is its loopback's speed, not a network's.")
    return lines


def _shown_spread(spread: Spread) -> str:
    return f"{format_rate(spread.median)} ({format_rate(spread.low)} to {format_rate(spread.high)})"
