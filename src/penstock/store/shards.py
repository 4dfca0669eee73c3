"""Data sets in tar shards, in the convention of WebDataset: members with one key are one sample."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog, CatalogKey, Ints, Packed
from penstock.store.files import unreadable
from penstock.store.group import Ids
from penstock.store.listing import (
    IMAGE_EXTENSIONS,
    NO_LABEL,
    Asking,
    Refresh,
    catalog_of,
    number_labels,
    stamp_at,
    stamp_of,
)
from penstock.store.packed import PackedFiles
from penstock.store.patterns import Paths, brief, files_of, is_of_several, place_of_paths
from penstock.store.tar import Members, read_members
from penstock.units import format_count

#: How the names of tar files end, and those of compressed ones, which are refused.
TAR_ENDINGS = (".tar",)
COMPRESSED_TAR_ENDINGS = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")

#: The label that is taken where there is one. A label of more bytes is none.
_USUAL_LABEL = "cls"
_MOST_LABEL_BYTES = 1 << 20


class TarShards(PackedFiles):
    """Tar files in the convention of WebDataset, read at random.

    The members whose names are the same up to the first dot of the base name are one sample: `0001.jpg`, `0001.cls` and
    `0001.json` that of the key `0001`. Samples are numbered by shard, then as their pictures lie in it. Keys without
    a picture, links and hidden members are left out.

    shards: a path, a pattern such as "train-{000..099}.tar" or "*.tar", a folder of tars, or a list of these.
    member: ending of the member that is the sample, such as "png" or "seg.png", the first that a key has of
        "jpg;png". A picture of any kind unless given, of which a key has one.
    label: "cls" takes the member that ends so, an integer or a name, and none where no key has it; any other ending is
        one that each key has to have, and "json:field" (or "json:outer.inner") a field of JSON, an integer or a name;
        None takes none. Names are numbered in sorted order. Samples without a label have -1.
    refresh, calls, catalog: as in `open_source`. A shard that did not change is not indexed again.

    Raises: DataError naming the shard if it is missing, empty, compressed, no tar, damaged or cut off, has a member
        twice, or no sample; naming the sample whose label is missing or cannot be read.
    """

    def __init__(
        self,
        shards: Paths,
        *,
        member: str | None = None,
        label: str | None = _USUAL_LABEL,
        refresh: Refresh = "auto",
        calls: Calls | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        place = place_of_paths(shards)
        endings = _endings(member)
        _check_label(label)
        opener = f"TarShards(member={member!r}, label={label!r})"
        list_anew = partial(list_shards, place, endings, member is not None, label)
        catalog = catalog or catalog_of(opener, place, endings, list_anew, refresh, calls or Calls())
        assert catalog.packed is not None, "shards are listed with where their samples lie"
        self.catalog, self.names = catalog, catalog.names
        self._starts = catalog.starts()
        self._offsets = catalog.packed.offsets
        self._ends = np.cumsum(catalog.counts)
        super().__init__(
            catalog.folders,
            catalog.packed.file_bytes,
            catalog.packed.file_times,
            place=brief(place),
            sizes_bytes=catalog.sizes_bytes,
            labels=catalog.labels,
            classes=catalog.classes,
        )

    def __repr__(self) -> str:
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        counts = f"{format_count(len(self), 'sample')}, {format_count(len(self.files), 'shard')}, {classes}"
        return f"TarShards({self.place!r}): {counts}"

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids]:
        units = np.searchsorted(self._ends, ids, side="right")
        return units, self._offsets[ids], self.sizes_bytes[ids]

    def describe(self, sample: int) -> str:
        self._size_of(sample)
        begin, end = self._starts[sample : sample + 2].tolist()
        unit = int(np.searchsorted(self._ends, sample, side="right"))
        return f"{self.files[unit]}: {os.fsdecode(self.names[begin : end - 1].tobytes())}"


def are_shards(place: str) -> bool:
    """Return whether a place, of `place_of_paths`, is of tar shards by its name, or is a folder with nothing but them.

    It asks the file system.
    """
    endings = TAR_ENDINGS + COMPRESSED_TAR_ENDINGS
    if place.lower().endswith(endings):
        return not os.path.isdir(place)
    if is_of_several(place):
        return files_of(place)[0].lower().endswith(endings)
    return bool(_shards_in(place))


def list_shards(
    place: str,
    endings: tuple[str, ...],
    is_given: bool,
    label: str | None,
    key: CatalogKey,
    old: Catalog | None,
    asking: Asking,
) -> Catalog:
    """Index tar shards; see `TarShards`. Of those that did not change, what an old catalog says is taken.

    endings: of the members that are samples; is_given: whether the user named them, in the order of preference.
    """
    calls, progress = asking.calls, asking.progress
    files = calls.one(place, lambda: _shards_of(place))
    known: dict[str, int] = {}
    if old is not None and old.packed is not None:
        stamps = calls.each(lambda path: stamp_at(path, calls), old.folders, look=progress.look)
        known = {
            path: index
            for index, (path, stamp) in enumerate(zip(old.folders, stamps, strict=True))
            if stamp == old.stamps[index] != 0
        }
        if files == old.folders and len(known) == len(set(files)):
            return old
    progress.begin_shards(len(files))

    def index(path: str) -> _Shard:
        calls.at(path)
        if path in known:
            assert old is not None, "what is known is from an old catalog"
            shard = _known_shard(old, known[path])
            progress.found.append(len(shard.names))
        else:
            shard = _index_shard(path, endings, is_given, label, asking)
        progress.sized.append(1)
        return shard

    shards = calls.each(index, files, look=progress.look)
    for note in _notes(place, files, shards):
        calls.report(note)
    return _joined(key, files, shards, label)


class _Shard(NamedTuple):
    """A shard as it is indexed.

    names, offsets, sizes: of its samples, in their order. labels: of each as text; None where no sample has one.
    stamp, file_bytes, file_time: of the file. left_out: keys without a sample, the first by name. links: left out.
    """

    names: list[bytes]
    offsets: Ints
    sizes: Ints
    labels: list[str] | None
    stamp: int
    file_bytes: int
    file_time: int
    left_out: int = 0
    first_left_out: str = ""
    links: int = 0
    has_end: bool = True


def _endings(member: str | None) -> tuple[str, ...]:
    if member is None:
        return IMAGE_EXTENSIONS
    given = tuple("." + each.strip().lstrip(".").lower() for each in member.split(";")) if member else ()
    if not all(len(each) > 1 for each in given) or not given:
        raise ConfigError(
            f'member is {member!r}; it is the ending of a member, such as "png", or several, "jpg;png"'
        )
    return given


def _check_label(label: object) -> None:
    if label is None:
        return
    ending, _, path = label.partition(":") if isinstance(label, str) else ("", "", "")
    if not ending or (":" in str(label)) != bool(path) or (path and ending != "json"):
        raise ConfigError(
            f'label is {label!r}; it is the ending of a member, such as "cls", a field of JSON, such as "json:class", '
            "or None"
        )


def _shards_in(folder: str) -> list[str]:
    """Return the tars directly in a folder, sorted; none where pictures or folders lie beside them."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        for endings in (TAR_ENDINGS, COMPRESSED_TAR_ENDINGS):
            shards = [os.path.join(folder, name) for name in found if name.lower().endswith(endings)]
            if shards:
                others = [name for name in found if name.lower().endswith(IMAGE_EXTENSIONS)]
                return (
                    []
                    if others or any(os.path.isdir(os.path.join(folder, name)) for name in found)
                    else shards
                )
    return []


def _shards_of(place: str) -> tuple[str, ...]:
    found: list[str] = []
    for path in files_of(place):
        if not os.path.isdir(path):
            found.append(path)
        elif shards := _shards_in(path):
            found += shards
        else:
            raise DataError(
                f"{path} is a folder without tar shards: give one with nothing but them, or their paths"
            )
    return tuple(found)


def _known_shard(old: Catalog, index: int) -> _Shard:
    """Return a shard as an old catalog has it."""
    assert old.packed is not None
    ends = np.cumsum(old.counts)
    first, last = int(ends[index] - old.counts[index]), int(ends[index])
    starts = old.starts()
    names = old.names[starts[first] : starts[last]].tobytes().split(b"\0")[:-1]
    numbers = old.labels[first:last].tolist()
    return _Shard(
        names,
        old.packed.offsets[first:last],
        old.sizes_bytes[first:last],
        [old.classes[number] for number in numbers] if numbers[0] >= 0 else None,
        int(old.stamps[index]),
        int(old.packed.file_bytes[index]),
        int(old.packed.file_times[index]),
    )


def _index_shard(
    path: str, endings: tuple[str, ...], is_given: bool, label: str | None, asking: Asking
) -> _Shard:
    now_ns = time.time_ns()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened: {error.strerror}; check the path, or take it out"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file: give tar files")
        with contextlib.suppress(OSError):  # what lies between the headers is not read ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        members = read_members(path, descriptor, status.st_size, asking.progress.found.append)
        found = _Samples(path, endings, is_given, label)
        found.take(members)
        left_out = found.left_out()
        return _Shard(
            [members.names[index] for index in found.samples.values()],
            np.array([members.offsets[index] for index in found.samples.values()], np.int64),
            np.array([members.sizes[index] for index in found.samples.values()], np.int64),
            found.read_labels(descriptor, members),
            stamp_of(status, now_ns),
            status.st_size,
            status.st_mtime_ns,
            len(left_out),
            f"{path}: {os.fsdecode(left_out[0])}" if left_out else "",
            members.links,
            members.has_end,
        )
    finally:
        os.close(descriptor)


class _Samples:
    """The members of a shard, joined by their keys."""

    def __init__(self, path: str, endings: tuple[str, ...], is_given: bool, label: str | None) -> None:
        self._path, self._is_given, self._label = path, is_given, label
        self._endings = endings
        #: By ending, which of them comes first.
        self._ranks = {ending[1:].encode(): rank for rank, ending in enumerate(endings)}
        self._label_ending = b"" if label is None else label.partition(":")[0].lower().encode()
        #: By key, the member that is the sample, or its label.
        self.samples: dict[bytes, int] = {}
        self._labels: dict[bytes, int] = {}
        self._keys: dict[bytes, None] = {}

    def take(self, members: Members) -> None:
        names = members.names
        for index, name in enumerate(names):
            base = name.rfind(b"/") + 1
            dot = name.find(b".", base)
            if dot <= base:  # hidden, or without an ending
                continue
            key, ending = name[:dot], name[dot + 1 :].lower()
            if ending in self._ranks:
                before = self.samples.setdefault(key, index)
                if before != index:
                    self._choose(members, key, before, index)
            elif ending == self._label_ending:
                if (before := self._labels.setdefault(key, index)) != index:
                    raise self._twice(members, before, index)
            else:
                self._keys[key] = None
        if not self.samples:
            raise self._no_sample(names)

    def _choose(self, members: Members, key: bytes, before: int, index: int) -> None:
        one, other = (members.names[each][len(key) + 1 :].lower() for each in (before, index))
        if one == other:
            raise self._twice(members, before, index)
        if not self._is_given:
            raise DataError(
                f"{self._path}: {os.fsdecode(key)} has two pictures, .{os.fsdecode(one)} and .{os.fsdecode(other)}: "
                f'say which is the sample, such as TarShards(..., member="{os.fsdecode(one)}")'
            )
        if self._ranks[other] < self._ranks[one]:
            self.samples[key] = index

    def _twice(self, members: Members, before: int, index: int) -> DataError:
        places = " and ".join(f"{members.offsets[each]:,}" for each in (before, index))
        return DataError(
            f"{self._path}: {os.fsdecode(members.names[index])} is there twice, at bytes {places}: keys are used once "
            "in a shard; write it anew"
        )

    def _no_sample(self, names: list[bytes]) -> DataError:
        wanted = ", ".join(self._endings)
        found = Counter(
            "." + os.fsdecode(name.rpartition(b"/")[2].partition(b".")[2].lower()) for name in names
        )
        if not found:
            return DataError(f"{self._path} has no members: remove it or write it again")
        (commonest, count), *_ = found.most_common(1)
        advice = (
            "these are archives themselves: unpack this one, and give what was in it"
            if commonest.endswith(TAR_ENDINGS + COMPRESSED_TAR_ENDINGS)
            else f'give member="{commonest[1:]}" to TarShards if these are the samples'
        )
        return DataError(
            f"{self._path} has {format_count(len(names), 'member')} but none that ends in {wanted} behind the first "
            f"dot of its name; {count:,} end in {commonest!r}: {advice}"
        )

    def left_out(self) -> list[bytes]:
        """Return the keys without a sample."""
        return [key for key in {**self._keys, **self._labels} if key not in self.samples]

    def read_labels(self, descriptor: int, members: Members) -> list[str] | None:
        """Return the label of each sample as text; None where none is wanted, or none is there."""
        found = [self._labels.get(key) for key in self.samples]
        if self._label is None or (
            self._label == _USUAL_LABEL and not any(index is not None for index in found)
        ):
            return None
        texts = []
        for key, index in zip(self.samples, found, strict=True):
            if index is None:
                raise DataError(
                    f"{self._path}: {os.fsdecode(key)} has no label, .{self._label_ending.decode()}: write one, or "
                    "give another label= to TarShards, None for no labels"
                )
            texts.append(self._text_of(descriptor, members, index))
        return texts

    def _text_of(self, descriptor: int, members: Members, index: int) -> str:
        size = members.sizes[index]
        if size > _MOST_LABEL_BYTES:
            raise self._no_label(members, index, f"has {size:,} bytes")
        try:
            content = os.pread(descriptor, size, members.offsets[index])
        except OSError as error:
            raise unreadable(self._path, error) from error
        assert self._label is not None
        _, _, path = self._label.partition(":")
        try:
            if not path:
                return content.decode("utf-8").strip()
            value: Any = json.loads(content)
            for name in path.split("."):
                value = value[int(name)] if isinstance(value, list) else value[name]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            what = f"is no JSON with a field {path!r}" if path else "is no text in UTF-8"
            raise self._no_label(members, index, f"{what} ({type(error).__name__})") from error
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self._no_label(members, index, f"has {path} = {value!r:.80}")
        return str(value)

    def _no_label(self, members: Members, index: int, why: str) -> DataError:
        return DataError(
            f"{self._path}: {os.fsdecode(members.names[index])} {why}; a label is an integer or a name: correct it, or "
            "give another label= to TarShards"
        )


def _notes(place: str, files: Sequence[str], shards: Sequence[_Shard]) -> list[str]:
    """Return lines about what was left out, and what looks cut off."""
    notes = []
    if count := sum(shard.left_out for shard in shards):
        first = next(shard.first_left_out for shard in shards if shard.left_out)
        notes.append(
            f"{brief(place)}: {format_count(count, 'key')} without a sample left out, the first {first}"
        )
    if links := [path for path, shard in zip(files, shards, strict=True) if shard.links]:
        count = sum(shard.links for shard in shards)
        notes.append(
            f"{brief(place)}: {format_count(count, 'link')} left out, as tar may write for a file that it "
            f"has twice; the first in {links[0]}"
        )
    if open_ended := [path for path, shard in zip(files, shards, strict=True) if not shard.has_end]:
        notes.append(
            f"{brief(place)}: {format_count(len(open_ended), 'shard')} without the mark at the end of a tar, which may "
            f"be cut off; the first {open_ended[0]}"
        )
    return notes


def _joined(key: CatalogKey, files: tuple[str, ...], shards: Sequence[_Shard], label: str | None) -> Catalog:
    counts = np.array([len(shard.names) for shard in shards], np.int64)
    ends = np.cumsum(counts)

    def describe(position: int) -> str:
        index = int(np.searchsorted(ends, position, side="right"))
        name = shards[index].names[position - int(ends[index])]
        return f"{files[index]}: {os.fsdecode(name)}"

    without = [path for path, shard in zip(files, shards, strict=True) if shard.labels is None]
    if without and len(without) < len(files):
        labelled = next(path for path, shard in zip(files, shards, strict=True) if shard.labels is not None)
        raise DataError(
            f"{without[0]} has no labels (.{label}), unlike {labelled}: label all shards, or give "
            "label=None to TarShards"
        )
    labels, classes = np.full(int(ends[-1]), NO_LABEL, np.int64), tuple[str, ...]()
    if not without:
        labels, classes = number_labels([text for shard in shards for text in shard.labels or ()], describe)
    return Catalog(
        key,
        "TarShards",
        time.time(),
        np.frombuffer(b"".join(b"\0".join(shard.names) + b"\0" for shard in shards), np.uint8),
        np.concatenate([shard.sizes for shard in shards]),
        labels,
        classes,
        files,
        np.array([shard.stamp for shard in shards], np.int64),
        counts,
        Packed(
            np.concatenate([shard.offsets for shard in shards]),
            np.array([shard.file_bytes for shard in shards], np.int64),
            np.array([shard.file_time for shard in shards], np.int64),
        ),
    )
