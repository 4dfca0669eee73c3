"""Data sets in tar shards, in the convention of WebDataset: members with one key are one sample."""

from __future__ import annotations

import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.store.catalog import Catalog
from penstock.store.files import unreadable
from penstock.store.listing import IMAGE_EXTENSIONS, Asking, ListingArguments
from penstock.store.packed_listing import (
    CataloguedFiles,
    FoundLabels,
    Indexed,
    Opened,
    all_files_below,
    index_files,
    number_or_name,
)
from penstock.store.patterns import Paths, brief, place_of_paths
from penstock.store.remote import Objects
from penstock.store.tar import Members, read_members
from penstock.units import format_count

#: How the names of tar files end, and those of compressed ones, which are refused.
TAR_KINDS = ((".tar",), (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4"))

#: The label that is taken where there is one. A label of more bytes is none.
_USUAL_LABEL = "cls"
_MOST_LABEL_BYTES = 1 << 20


#: How arrays end that NumPy wrote.
_ARRAYS = b"npy"


class TarShards(CataloguedFiles):
    """Tar files in the convention of WebDataset, read at random.

    The members whose names are the same up to the first dot of the base name are one sample: `0001.jpg`, `0001.cls` and
    `0001.json` that of the key `0001`. Samples are numbered by shard, then as their pictures lie in it. Keys without
    a picture, links and hidden members are left out.

    shards: a path, a pattern such as "train-{000..099}.tar" or "*.tar", a folder of tars, or a list of these.
    member: ending of the member that is the sample, such as "png" or "seg.png", the first that a key has of
        "jpg;png". A picture of any kind unless given, of which a key has one.
    label: "cls" takes the member that ends so, an integer or a name, and none where no key has it; any other ending is
        one that each key has to have, "npy" of arrays of numbers, of one type and shape; and "json:field" (or
        "json:outer.inner") a field of JSON: an integer, a name, another number, or a list, which become what `Manifest`
        makes of them; a list of such fields gives several, by name. None takes none. Names are numbered in sorted
        order. Samples without a label have -1.
    classes: the names of labels in the order of their numbers, such as those of the training's source; an error for
        others. Sorted by name unless given.
    refresh, calls, catalog, storage_options: as in `open_source`. A shard that did not change is not indexed again.

    Raises: DataError naming the shard if it is missing, empty, compressed, no tar, damaged or cut off, has a member
        twice, or no sample; naming the sample whose label is missing or cannot be read.
    """

    def __init__(
        self,
        shards: Paths,
        *,
        member: str | None = None,
        label: str | Sequence[str] | None = _USUAL_LABEL,
        classes: Sequence[str] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        place = place_of_paths(shards)
        endings = _endings(member)
        label = _checked_label(label)
        #: Endings of the members that are samples, with their dots.
        self.endings = endings
        list_anew = partial(list_shards, place, endings, member is not None, label)
        super().__init__(
            place, list_anew, listing, endings=endings, member=member, label=label, classes=classes
        )


def list_shards(
    place: str, endings: tuple[str, ...], is_given: bool, label: str | tuple[str, ...] | None, asking: Asking
) -> Catalog:
    """Index tar shards; see `TarShards`. Of those that did not change, what an old catalog says is taken.

    endings: of the members that are samples; is_given: whether the user named them, in the order of preference.
    """
    files = asking.calls.one(place, lambda: shards_of(place, asking.objects))
    shards: dict[str, _Samples] = {}

    def index(file: Opened) -> Indexed:
        shard = shards[file.path] = _Samples(file.path, endings, is_given, label)
        return shard.index(file, partial(asking.found, file.path))

    catalog = index_files(
        asking, files, index, kind="TarShards", label=f".{label}", has_json="json:" in str(label)
    )
    for note in notes_on(place, [shards[path] for path in files if path in shards]):
        asking.calls.report(note)
    return catalog


def _endings(member: str | None) -> tuple[str, ...]:
    if member is None:
        return IMAGE_EXTENSIONS
    parts = member.split(";") if isinstance(member, str) else []
    given = tuple("." + each.strip().lstrip(".").lower() for each in parts)
    if not all(len(each) > 1 for each in given) or not given:
        raise ConfigError(
            f'member is {member!r}; it is the ending of a member, such as "png", or several, "jpg;png"'
        )
    return given


def _checked_label(label: Any) -> str | tuple[str, ...] | None:
    if label is None:
        return None
    given = [label] if isinstance(label, str) else label
    texts = [str(each).lstrip(".") for each in given] if isinstance(given, list | tuple) else []
    for text in texts:
        ending, colon, path = text.partition(":")
        is_field = bool(path) and ending == "json"
        if not ending or not (is_field or (isinstance(label, str) and not colon)):
            texts = []
    if not texts:
        raise ConfigError(
            f'label is {label!r}; it is the ending of a member, such as "cls", a field of JSON, such as "json:class", '
            "a list of such fields, or None"
        )
    return texts[0] if isinstance(label, str) else tuple(texts)


def shards_of(place: str, objects: Objects | None) -> tuple[str, ...]:
    """Return the tar files that a place is. objects: what reads addresses."""
    return all_files_below(place, TAR_KINDS, "tar shards", objects, are_any_named=True)


class _Samples:
    """The members of a shard, joined by their keys."""

    def __init__(
        self, path: str, endings: tuple[str, ...], is_given: bool, label: str | tuple[str, ...] | None
    ) -> None:
        self.path, self._is_given, self._label = path, is_given, label
        self._endings = endings
        #: By ending, which of them comes first.
        self._ranks = {ending[1:].encode(): rank for rank, ending in enumerate(endings)}
        of_labels = label if isinstance(label, str) else "json" if label else ""
        self._label_ending = of_labels.partition(":")[0].lower().encode()
        #: By key, the member that is the sample, or its label.
        self.samples: dict[bytes, int] = {}
        self._labels: dict[bytes, int] = {}
        self._keys: dict[bytes, None] = {}
        #: Keys without a sample. Links, which are left out. Whether the archive has its end mark.
        self.left_out: list[bytes] = []
        self.links, self.has_end = 0, True

    def index(self, file: Opened, report_found: Callable[[int], None]) -> Indexed:
        """Return what the shard has."""
        members = read_members(file.path, file.pread, file.file_bytes, report_found)
        self._take(members)
        self.left_out = [key for key in {**self._keys, **self._labels} if key not in self.samples]
        self.links, self.has_end = members.links, members.has_end
        which, labels = list(self.samples.values()), self._read_labels(file, members)
        for keys in (self.samples, self._labels, self._keys):  # of all shards they would be large
            keys.clear()
        return Indexed(
            file,
            [members.names[index] for index in which],
            np.array([members.offsets[index] for index in which], np.int64),
            np.array([members.sizes[index] for index in which], np.int64),
            labels,
        )

    def _take(self, members: Members) -> None:
        names = members.names
        for index, name in enumerate(names):
            parts = key_and_ending(name)
            if parts is None:
                continue
            key, ending = parts
            if ending in self._ranks:
                before = self.samples.setdefault(key, index)
                if before != index:
                    self._choose(members, key, before, index)
            elif ending == self._label_ending:
                if (before := self._labels.setdefault(key, index)) != index:
                    raise member_twice(self.path, members, before, index)
            else:
                self._keys[key] = None
        if not self.samples:
            raise self._no_sample(names)

    def _choose(self, members: Members, key: bytes, before: int, index: int) -> None:
        one, other = (members.names[each][len(key) + 1 :].lower() for each in (before, index))
        if one == other:
            raise member_twice(self.path, members, before, index)
        if not self._is_given:
            raise DataError(
                f"{self.path}: {os.fsdecode(key)} has two pictures, .{os.fsdecode(one)} and .{os.fsdecode(other)}: "
                f'say which is the sample, such as TarShards(..., member="{os.fsdecode(one)}")'
            )
        if self._ranks[other] < self._ranks[one]:
            self.samples[key] = index

    def _no_sample(self, names: list[bytes]) -> DataError:
        wanted = ", ".join(self._endings)
        found = Counter(
            "." + os.fsdecode(name.rpartition(b"/")[2].partition(b".")[2].lower()) for name in names
        )
        if not found:
            return DataError(f"{self.path} has no members: remove it or write it again")
        (commonest, count), *_ = found.most_common(1)
        advice = (
            "these are archives themselves: unpack this one, and give what was in it"
            if commonest.endswith(tuple(chain(*TAR_KINDS)))
            else f'give member="{commonest[1:]}" to TarShards if these are the samples'
        )
        return DataError(
            f"{self.path} has {format_count(len(names), 'member')} but none that ends in {wanted} behind the first "
            f"dot of its name; {count:,} end in {commonest!r}: {advice}"
        )

    def _read_labels(self, file: Opened, members: Members) -> FoundLabels:
        """Return the label of each sample; None where none is wanted, or none is there."""
        found = [self._labels.get(key) for key in self.samples]
        if self._label is None or (
            self._label == _USUAL_LABEL and not any(index is not None for index in found)
        ):
            return None
        names = self._label if isinstance(self._label, tuple) else (self._label,)
        labels = list[list[Any]]()
        for key, index in zip(self.samples, found, strict=True):
            if index is None:
                raise DataError(
                    f"{self.path}: {os.fsdecode(key)} has no label, .{self._label_ending.decode()}: write one, or "
                    "give another label= to TarShards, None for no labels"
                )
            labels.append(self._labels_of(file, members, index, names))
        if not isinstance(self._label, tuple):
            only = [label for (label,) in labels]
            is_array = any(isinstance(label, np.ndarray) for label in only)
            return self._stacked(only) if is_array else only
        paths = [name.partition(":")[2] for name in names]
        return {path: list(each) for path, each in zip(paths, zip(*labels, strict=True), strict=True)}

    def _labels_of(self, file: Opened, members: Members, index: int, names: Sequence[str]) -> list[Any]:
        """Return what a member has as each of the labels."""
        size = members.sizes[index]
        if size > _MOST_LABEL_BYTES:
            raise self._no_label(members, index, f"has {size:,} bytes")
        try:
            content = file.pread(size, members.offsets[index])
        except DataError:
            raise
        except OSError as error:
            raise unreadable(self.path, error) from error
        found = list[Any]()
        for _, _, path in (name.partition(":") for name in names):
            try:
                if not path and self._label_ending.endswith(_ARRAYS):
                    array = read_array(content)
                    return [array if array.ndim or array.dtype.kind not in "biu" else int(array)]
                if not path:
                    return [number_or_name(content.decode("utf-8").strip())]
                value = json_field(json.loads(content), path)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                is_array = self._label_ending.endswith(_ARRAYS)
                else_what = (
                    "is no array of numbers as numpy.save writes it" if is_array else "is no text in UTF-8"
                )
                what = f"is no JSON with a field {path!r}" if path else else_what
                raise self._no_label(members, index, f"{what} ({type(error).__name__})") from error
            if not isinstance(value, int | float | str | list):
                raise self._no_label(members, index, f"has {path} = {value!r:.80}")
            found.append(value)
        return found

    def _stacked(self, arrays: Sequence[Any]) -> FoundLabels:
        """Return arrays that are labels as one. Raises: DataError naming the key whose array is another."""
        facts = [(each.dtype, each.shape) for each in map(np.asarray, arrays)]
        if (other := next((index for index, each in enumerate(facts) if each != facts[0]), None)) is not None:
            key, found = list(self.samples)[other], [f"{dtype}{list(shape)}" for dtype, shape in facts]
            raise DataError(
                f"{self.path}: {os.fsdecode(key)} has a label of {found[other]}, and the first key {found[0]}: "
                "write arrays of one type and shape, or take them as a field by penstock.loader.TarSamples"
            )
        return {"": np.stack(arrays)}

    def _no_label(self, members: Members, index: int, why: str) -> DataError:
        return DataError(
            f"{self.path}: {os.fsdecode(members.names[index])} {why}; a label is a number, a name or, in JSON, a list: "
            "correct it, or give another label= to TarShards"
        )


def key_and_ending(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the two parts of a member's name, the ending in lower case; None where it is hidden or has no ending.

    >>> key_and_ending(b"a/0001.seg.PNG")
    (b'a/0001', b'seg.png')
    """
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    return None if dot <= base else (name[:dot], name[dot + 1 :].lower())


def member_twice(path: str, members: Members, before: int, index: int) -> DataError:
    """Return what to raise for two members of one name. before, index: where they are among the members."""
    places = " and ".join(f"{members.offsets[each]:,}" for each in (before, index))
    return DataError(
        f"{path}: {os.fsdecode(members.names[index])} is there twice, at bytes {places}: keys are used once "
        "in a shard; write it anew"
    )


def read_array(content: bytes) -> NDArray[Any]:
    """Return the array of numbers that `numpy.save` wrote.

    Raises: ValueError for anything else; for one that is cut off, or whose header says more than there is.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"a .npy file of version {version[0]}.{version[1]}, which has no numbers")
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, is_fortran, dtype = read_header(file)
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {dtype}")
    data, nbytes = content[file.tell() :], math.prod(shape) * dtype.itemsize
    if len(data) != nbytes:
        raise ValueError(f"{len(data):,} bytes of numbers, and its header says {nbytes:,}")
    found: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")
    return found.astype(dtype.newbyteorder("="))


def json_field(value: Any, path: str) -> Any:
    """Return a field of what JSON has: "class", or "outer.inner", where numbers are places in a list.

    Raises: LookupError, TypeError or ValueError where there is none.
    """
    is_field = isinstance(value, dict) and path in value
    for name in [path] if is_field else path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


class IndexedShard(Protocol):
    """What was found in a shard that was indexed now, besides its samples; see `_Samples`."""

    path: str
    left_out: list[bytes]
    links: int
    has_end: bool


def notes_on(place: str, shards: Sequence[IndexedShard]) -> list[str]:
    """Return lines about what was left out, and what looks cut off, in shards that were indexed now."""
    notes = []
    if without := [shard for shard in shards if shard.left_out]:
        count = sum(len(shard.left_out) for shard in shards)
        first = f"{without[0].path}: {os.fsdecode(without[0].left_out[0])}"
        notes.append(
            f"{brief(place)}: {format_count(count, 'key')} without a sample left out, the first {first}"
        )
    if links := [shard for shard in shards if shard.links]:
        count = sum(shard.links for shard in links)
        notes.append(
            f"{brief(place)}: {format_count(count, 'link')} left out, as tar may write for a file that it "
            f"has twice; the first in {links[0].path}"
        )
    if open_ended := [shard.path for shard in shards if not shard.has_end]:
        notes.append(
            f"{brief(place)}: {format_count(len(open_ended), 'shard')} without the mark at the end of a tar, which may "
            f"be cut off; the first {open_ended[0]}"
        )
    return notes
