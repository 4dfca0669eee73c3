"""Local disks, and backends of one's own, that keep samples for a loader: which there are, what they have already, and
what goes there.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.resume import add_array, describe_data
from penstock.machine import Curve, Machine, StorageClass
from penstock.policy import Placement
from penstock.policy.forms import CropForm, DiskPart
from penstock.store import FileSource, PackedFiles, Source
from penstock.store.calls import Calls
from penstock.store.direct import in_blocks, pays
from penstock.store.disk import (
    DiskTier,
    disk_tiers,
    free_bytes,
    has_tier,
    is_fault_of_disk,
    remove_tier,
    reserved_bytes,
)
from penstock.store.key_value import KeyValueTier
from penstock.store.mixing import sources_in
from penstock.store.mounts import is_network, mount_of, mounted
from penstock.store.tier import SlowTier
from penstock.store.write_behind import WriteBehind
from penstock.units import parse_bytes

#: Where samples are kept on a disk: a folder, or folders and how much each may hold.
LocalDisk = str | os.PathLike[str] | Mapping[str, str | int]

# What is assumed of a disk that nobody measured; observed reads correct it.
_UNKNOWN_BYTES_PER_SECOND, _UNKNOWN_LATENCY_SECONDS, _THREADS = 500e6, 1e-4, 4
#: Smaller samples, on average, follow each other on a disk: an eighth of it would be lost to what lies between them.
_LEAST_PADDED_BYTES = 16 << 10


def check_local_disk(local_disk: object) -> None:
    """Raise ConfigError unless it names folders, and sizes that are some."""
    given = {local_disk: None} if isinstance(local_disk, str | os.PathLike) else local_disk
    if (
        not isinstance(given, Mapping)
        or not given
        or not all(isinstance(path, str | os.PathLike) for path in given)
    ):
        raise ConfigError(
            f"local_disk is {local_disk!r:.80}; it is a folder, or folders and what each may hold: "
            '{"/scratch/penstock": "200 GiB"}'
        )
    for path, size in given.items():
        try:
            if size is not None and parse_bytes(size) < 1:
                raise ConfigError(f"it is {size!r}; give some bytes")
        except ConfigError as error:
            raise ConfigError(f"local_disk[{os.fspath(path)!r}]: {error}") from error


def disk_classes(
    local_disk: LocalDisk | None, machine: Machine | None, total_bytes: int
) -> list[StorageClass]:
    """Return the disks that samples may be kept on, as storage classes: the user's, or those of the machine.

    total_bytes: of the data, which no disk needs more than.
    """
    known = [] if machine is None else [each for each in machine.storage[1:] if each.backend != "memory"]
    if local_disk is None:
        return [replace(each, capacity_bytes=min(each.capacity_bytes, max(1, total_bytes))) for each in known]
    known = [each for each in known if each.backend == "filesystem"]
    given = local_disk if isinstance(local_disk, Mapping) else {os.fspath(local_disk): total_bytes}
    read = Curve(((1, _UNKNOWN_BYTES_PER_SECOND),))
    found = []
    for number, (path, size) in enumerate(given.items()):
        capacity_bytes = max(1, min(parse_bytes(size), total_bytes))
        like = next((each for each in known if each.path == os.fspath(path)), None) or StorageClass(
            f"disk {number + 1}" if len(given) > 1 else "disk",
            capacity_bytes,
            _THREADS,
            read,
            latency_seconds=_UNKNOWN_LATENCY_SECONDS,
            backend="filesystem",
            path=os.path.abspath(os.path.expanduser(path)),
        )
        found.append(replace(like, capacity_bytes=capacity_bytes))
    return found


def check_space(disks: Sequence[StorageClass], largest_bytes: int) -> None:
    """Raise ConfigError for a disk that is to have less than the largest sample."""
    for each in disks:
        if each.capacity_bytes < largest_bytes:
            raise ConfigError(
                f"{each.path!r} is to keep {each.capacity_bytes:,} bytes; a local disk needs at least the largest "
                f"sample ({largest_bytes:,} bytes): raise it or leave the disk out"
            )


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk that keeps samples, or a part of one.

    part: what it is to the machine. tier: what is there; None for a prediction.
    """

    part: DiskPart
    tier: SlowTier | None = None

    @property
    def storage(self) -> StorageClass:
        return self.part.storage


def padded_bytes(sizes_bytes: NDArray[np.int64]) -> int:
    """Return what samples take on a disk where each begins at a block; small ones, of which this costs much, do not.

    sizes_bytes: int64[samples], of each.
    """
    if sizes_bytes.sum() < _LEAST_PADDED_BYTES * sizes_bytes.size:
        return int(sizes_bytes.sum())
    return int(in_blocks(sizes_bytes).sum())


class Content(NamedTuple):
    """What disks are to keep. sizes_bytes: int64[samples], as of `DiskTier`. about: for people.

    changed_since: of a data set's rows, what differs from those that another tier is about; see `RowCode`.
    """

    fingerprint: bytes
    sizes_bytes: NDArray[np.int64]
    about: str
    changed_since: Callable[[str], list[str]] | None = None


def content_of(source: Source, pixels: Mapping[str, object] | None, crop_bytes: int = -1) -> Content:
    """Return what disks are to keep of a source.

    pixels: what fixes those that are kept in place of stored bytes; None for these. crop_bytes: of each, -1 for
        pictures.
    """
    fingerprint, about = fingerprint_of(source), repr(source)
    if pixels is None:
        return Content(fingerprint, source.sizes_bytes, about)
    described = json.dumps([fingerprint.hex(), pixels], sort_keys=True, default=str)
    sizes_bytes = np.full(len(source), crop_bytes)
    return Content(xxhash.xxh3_128_digest(described.encode()), sizes_bytes, f"{about}, as {pixels['form']}")


def has_space(parts: Sequence[DiskPart], content: Content) -> bool:
    """Return whether disks have as much free as they may keep, or a tier of the content that is in a form is there."""
    wanted = dict[str, int]()
    for part in parts:
        path = part.storage.path
        assert path is not None, "it is a folder"
        wanted[path] = wanted.get(path, 0) + part.space_bytes
    return all(
        has_tier(path, content.fingerprint) or nbytes <= free_bytes(path) for path, nbytes in wanted.items()
    )


def open_disks(
    parts: Sequence[DiskPart],
    contents: Mapping[bool, Content],
    rank: int,
    calls: Calls,
    closing: ExitStack,
    *,
    is_new: bool,
    page_cache_bytes: int,
) -> list[Disk]:
    """Open the tiers on some disks, with as much space as these have. They are closed by `closing`.

    A disk that is full or fails is reported and left out; one on a network file system is reported and used.
    contents: what those that are in a form keep (True), and the others (False).
    rank: of this process. is_new: whether what earlier runs left is given up.
    page_cache_bytes: that the kernel may have for what it reads of them.
    Raises: DataError naming the folder where one cannot be used.
    """
    disks = dict[int, Disk]()
    is_direct = pays(sum(each.space_bytes for each in parts), page_cache_bytes)
    # What an earlier run reserved for one part and that part no longer needs is free for the others.
    grown = [_growth_bytes(part, contents[part.is_in_form], rank) for part in parts]
    for number in sorted(range(len(parts)), key=grown.__getitem__):
        part = parts[number]
        storage = replace(part.storage, capacity_bytes=part.space_bytes)
        content = contents[part.is_in_form]
        make = partial(
            _open_tier,
            storage,
            content,
            rank,
            calls.report,
            is_direct=is_direct,
            padding_bytes=part.padding_bytes,
        )
        try:
            tier = calls.one(f"local disk {storage.path!r}", make)
        except DataError as error:
            if not is_fault_of_disk(error):
                raise
            calls.report(f"{error}; this run continues without it")
            continue
        closing.callback(tier.close)
        if is_new:
            tier.evict(tier.held())
        disks[number] = Disk(_with_space(part, tier.capacity_bytes), tier)
    return [disks[number] for number in sorted(disks)]


def _growth_bytes(part: DiskPart, content: Content, rank: int) -> int:
    """Return how much more a part wants than an earlier run reserved for it."""
    if part.storage.backend != "filesystem" or part.storage.path is None:
        return 0
    wanted_bytes = part.space_bytes + part.padding_bytes
    return wanted_bytes - reserved_bytes(part.storage.path, content.fingerprint, rank)


def _with_space(part: DiskPart, space_bytes: int) -> DiskPart:
    """Return a part of which so much was reserved, no more than it wanted."""
    if space_bytes == part.space_bytes:
        return part
    had = space_bytes / part.space_bytes
    capacity_bytes = max(1, int(part.storage.capacity_bytes * had))
    storage = replace(part.storage, capacity_bytes=capacity_bytes)
    return part._replace(storage=storage, copies_bytes=int(part.copies_bytes * had))


def _open_tier(
    storage: StorageClass,
    content: Content,
    rank: int,
    report: Callable[[str], None],
    *,
    is_direct: bool,
    padding_bytes: int,
) -> SlowTier:
    capacity_bytes, (fingerprint, sizes_bytes, about, changed_since) = storage.capacity_bytes, content
    if storage.backend == "filesystem":
        assert storage.path is not None, "its class has checked it"
        mount = mount_of(storage.path, mounted())
        if mount is not None and is_network(mount.kind):
            report(
                f"{storage.path} lies on {mount.kind} ({mount.device}), whose bytes may come over the network: keep "
                "samples on a disk of this machine"
            )
        if changed_since is not None and not has_tier(storage.path, fingerprint):
            _replace_outdated(storage.path, changed_since, report)
        return DiskTier(
            storage.path,
            capacity_bytes,
            fingerprint,
            sizes_bytes,
            about=about,
            number=rank,
            report=report,
            is_direct=is_direct,
            is_own=changed_since is not None,
            padding_bytes=padding_bytes,
        )
    module, _, name = storage.backend.partition(":")
    try:
        store = getattr(importlib.import_module(module), name)(storage.path)
    except Exception as error:
        raise ConfigError(
            f"machine.storage: {storage.name!r} has the backend {storage.backend!r}, which cannot be made with "
            f"{storage.path!r}: {type(error).__name__}: {error}; name a class as 'package.module:Name' "
            "that is found on sys.path"
        ) from error
    return KeyValueTier(store, capacity_bytes, fingerprint, sizes_bytes, number=rank, report=report)


def _replace_outdated(
    folder: str, changed_since: Callable[[str], list[str]], report: Callable[[str], None]
) -> None:
    """Report rows of the same data set that are not used, and remove those that its code of today would not make."""
    try:
        tiers = disk_tiers(folder)
    except OSError:  # who opens the folder says what is wrong with it
        return
    for path, changed in {each.path: changed_since(each.about) for each in tiers}.items():
        if not changed:
            continue
        try:
            is_removed = "data" not in changed and remove_tier(path)
        except FileNotFoundError:  # another rank was first, and has said so
            continue
        except OSError:
            is_removed = False
        report(
            f"{path} has rows of this data set, made with other {' and '.join(changed)}: they are made anew"
            + (" in their place" if is_removed else ", and those stay")
        )


def fingerprint_of(source: Source) -> bytes:
    """Return 16 bytes that tell data from others: names, sizes, labels, where they are, and of files that hold many
    samples, and objects, when they were written. That one of many small files was overwritten is not seen.

    Of a source of one's own without a `fingerprint` nobody knows whether its content is the same in another run: it
    gets another one each time.
    """
    digest = xxhash.xxh3_128(repr(describe_data(source)).encode())
    for each in sources_in(source):
        place = str(getattr(each, "root", getattr(each, "place", "")))
        digest.update(place.encode("utf-8", "surrogateescape"))
        if isinstance(each, PackedFiles):
            add_array(digest, each.file_times)
        elif isinstance(each, FileSource):
            if each.catalog.object_stamps is not None:
                add_array(digest, each.catalog.object_stamps)
        else:
            digest.update(str(getattr(each, "fingerprint", "")).encode() or os.urandom(16))
    return digest.digest()


def place_ids(source: Source) -> list[str]:
    """Return what tells on this host where a source reads from, whatever links lead there: of each folder, or first
    file of those that hold many samples, its device and inode; of an address, and where there is nothing, its name.
    """
    return [
        _place_id(
            each.files[0]
            if isinstance(each, PackedFiles) and each.files
            else str(getattr(each, "root", getattr(each, "place", "")))
        )
        for each in sources_in(source)
    ]


def _place_id(place: str) -> str:
    try:
        found = os.stat(place)
    except (OSError, ValueError):
        return place
    return f"{found.st_dev}:{found.st_ino}"


@dataclass(frozen=True, slots=True)
class KeptOnDisks:
    """What disks keep of a run.

    tiers: by number. held: by tier, what an earlier run left. copied: as of `SourceFetcher`.
    in_form: numbers of tiers that have crops or pictures, not samples as stored.
    """

    tiers: dict[int, WriteBehind]
    held: dict[int, NDArray[np.int64]]
    copied: dict[int, NDArray[np.bool_]]
    in_form: frozenset[int] = frozenset()


def kept_on(
    disks: list[Disk],
    first: int,
    placement: Placement,
    sizes_bytes: NDArray[np.int64],
    queue_bytes: int,
    form: CropForm | None = None,
    *,
    is_shared: bool = False,
) -> KeptOnDisks:
    """Give up what earlier runs left on disks and no tier shall keep, and return what disks keep from now on.

    first: number of the first disk's tier. queue_bytes: of samples that wait to be written, to all disks.
    form: of the disks that are in one. is_shared: other ranks wait for what these disks are to keep.
    """
    tiers, held, copied = (
        dict[int, WriteBehind](),
        dict[int, NDArray[np.int64]](),
        dict[int, NDArray[np.bool_]](),
    )
    faster = placement.fill_order[placement.tier_of[placement.fill_order] < first]
    for number, disk in enumerate(disks, first):
        own, kept_bytes = placement.samples_in(number), sizes_bytes
        if disk.part.is_in_form:
            assert form is not None, "a disk has it"
            kept_bytes = np.full(sizes_bytes.size, form.crop_bytes)
        if disk.tier is not None:
            left = disk.tier.held()
            disk.tier.evict(left[placement.tier_of[left] <= 0])
            if placement.spares is None:
                _make_room(disk.tier, placement.tier_of, number, first, int(kept_bytes[own].sum()))
            held[number] = disk.tier.held()
            threads = disk.storage.writing_threads
            tiers[number] = WriteBehind(disk.tier, queue_bytes // len(disks), threads, is_shared=is_shared)
        # What memory keeps is lost when the process ends: a disk with space to spare has it for the next run. Where
        # samples are dropped, that space is for others.
        if placement.spares is not None:
            continue
        spare_bytes = disk.storage.capacity_bytes + disk.part.copies_bytes - int(kept_bytes[own].sum())
        count = int(np.searchsorted(np.cumsum(kept_bytes[faster]), spare_bytes, side="right"))
        if count:
            copied[number] = np.zeros(sizes_bytes.size, bool)
            copied[number][faster[:count]] = True
            faster = faster[count:]
    in_form = frozenset(number for number, disk in enumerate(disks, first) if disk.part.is_in_form)
    return KeptOnDisks(tiers, held, copied, in_form)


def _make_room(tier: SlowTier, tier_of: NDArray[np.int8], number: int, first: int, own_bytes: int) -> None:
    """Give up what an earlier run left for other disks, then what memory keeps, where a disk's own lacks space.

    own_bytes: of all samples that this disk is to keep, so many as in `kept_on`.
    """
    for is_for_memory in (False, True):
        held = tier.held()
        home, nbytes = tier_of[held], tier.sizes_of(held)
        if own_bytes + int(nbytes[home != number].sum()) <= tier.capacity_bytes:
            return
        tier.evict(held[(home != number) & ((home < first) == is_for_memory)])
