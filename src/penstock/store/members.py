"""Several members of each key of tar shards as one piece of its shard: a sample of WebDataset with all its fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Unpack, cast

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.store.catalog import Catalog, Ints
from penstock.store.listing import Asking, ListingArguments, stamp_at
from penstock.store.packed_listing import CataloguedFiles, Indexed, Opened, index_files, opened
from penstock.store.patterns import Paths, brief, place_of_paths
from penstock.store.shards import key_and_ending, member_twice, notes_on, shards_of
from penstock.store.tar import Members, read_members
from penstock.units import format_count

#: The members that are wanted, by the name of their field: their endings, the first that a key has is taken.
Wanted = Mapping[str, tuple[str, ...]]


class Member(NamedTuple):
    """A member of a sample. begin, end: of its content in the sample's bytes."""

    field: str
    ending: str
    begin: int
    end: int


class TarMembers(CataloguedFiles):
    """Several members of each key of tar shards, in the convention of WebDataset, read together.

    A sample is the piece of its shard from the first to the last of its members, whatever is between them:
    `members_of` says where in it they are. Samples are numbered by shard, then as they lie in it. Keys that have none
    of the members are left out, as are links and hidden members.

    shards: as in `TarShards`.
    wanted: None takes all that the first key of the first shard has.
    refresh, calls, catalog, storage_options: as in `open_source`.

    Raises: DataError as `TarShards`; naming the key whose members do not follow each other; ConfigError for a field
        whose member no key has.
    """

    def __init__(
        self, shards: Paths, wanted: Wanted | None = None, **listing: Unpack[ListingArguments]
    ) -> None:
        place = place_of_paths(shards)
        given = None if wanted is None else {field: tuple(each) for field, each in wanted.items()}
        super().__init__(place, partial(list_members, place, given), listing, members=given)
        #: By field, of each sample: where its member begins, how long it is, and which of the endings it has; -1 and
        #: zeros for a sample without.
        self._members = cast(Mapping[str, Ints], self.labels)
        self.labels = {}
        self.wanted = given or {field: (field,) for field in self._members}

    def members_of(self, sample: int) -> Iterator[Member]:
        """Yield the members that a sample has, in the order of the fields."""
        for field, table in self._members.items():
            begin, size, which = table[sample].tolist()
            if begin >= 0:
                yield Member(field, self.wanted[field][which], begin, begin + size)


def check_wanted(fields: object) -> dict[str, tuple[str, ...]]:
    """Return endings by field, in lower case and without their dots. fields: as the user gave them.

    Raises: ConfigError for what are no endings by name.

    >>> check_wanted({"image": "jpg;png", "caption": ".txt"})
    {'image': ('jpg', 'png'), 'caption': ('txt',)}
    """
    wanted = {}
    for field, text in fields.items() if isinstance(fields, Mapping) else ():
        endings = (
            [each.strip().lstrip(".").lower() for each in text.split(";")] if isinstance(text, str) else []
        )
        if not isinstance(field, str) or not field or not endings or not all(endings):
            break
        wanted[field] = tuple(endings)
    else:
        if wanted:
            return wanted
    raise ConfigError(
        f"fields is {fields!r:.200}; it has the endings of members by names of yours, such as "
        '{"image": "jpg;png", "caption": "txt"}, or is a list of endings'
    )


def list_members(place: str, wanted: Wanted | None, asking: Asking) -> Catalog:
    """Index tar shards; see `TarMembers`. Of those that did not change, what an old catalog says is taken."""
    files = asking.calls.one(place, lambda: shards_of(place, asking.objects))
    fields = wanted or asking.calls.one(files[0], partial(_fields_of, files[0], asking))
    if asking.old is not None and asking.old.labels.keys() != fields.keys():  # type: ignore[union-attr]
        asking = replace(asking, old=None)
    shards: dict[str, _Keys] = {}

    def index(file: Opened) -> Indexed:
        shard = shards[file.path] = _Keys(file.path, fields)
        return shard.index(file, partial(asking.found, file.path))

    catalog = index_files(asking, files, index, kind="TarMembers", label=None)
    for note in notes_on(place, [shards[path] for path in files if path in shards]):
        asking.calls.report(note)
    for field, table in cast(Mapping[str, Ints], catalog.labels).items():
        if (table[:, 0] < 0).all():
            first = asking.calls.one(files[0], partial(_fields_of, files[0], replace(asking, old=None)))
            raise ConfigError(
                f"fields has {field!r}, and no key of {brief(place)} has a member that ends in "
                f"{' or '.join(fields[field])}; the first key has {', '.join(first)}: correct the ending, or leave the "
                "field out"
            )
    return catalog


def _fields_of(path: str, asking: Asking) -> Wanted:
    """Return the endings that the first key of the first shard has. Raises: DataError where there is none."""
    old, objects = asking.old, asking.objects
    if old is not None and old.folders[0] == path:
        stamp = stamp_at(path, asking.calls) if objects is None else objects.facts([path])[0].stamp
        if stamp == old.stamps[0] > 0:
            return {field: (field,) for field in cast(Mapping[str, Ints], old.labels)}
    with opened(path, objects) as file:
        parts = map(key_and_ending, read_members(path, file.pread, file.file_bytes).names)
        known = [each for each in parts if each is not None]
    if not known:
        raise DataError(
            f"{path} has no members with a key and an ending: give shards in the convention of WebDataset"
        )
    endings = [os.fsdecode(ending) for key, ending in known if key == known[0][0]]
    return {ending: (ending,) for ending in endings}


class _Keys:
    """The members of a shard that are wanted, by their keys; see `IndexedShard`."""

    def __init__(self, path: str, wanted: Wanted) -> None:
        self.path = path
        #: By ending, its field and which of that field's endings it is.
        self._fields = {
            os.fsencode(ending): (field, which)
            for field, endings in wanted.items()
            for which, ending in enumerate(endings)
        }
        self._names = list(wanted)
        self.left_out: list[bytes] = []
        self.links, self.has_end = 0, True
        #: Of the samples: key, where they begin, their sizes, and three numbers for each field.
        self._keys, self._begins, self._sizes = list[bytes](), list[int](), list[int]()
        self._rows: list[list[tuple[int, int, int]]] = []

    def index(self, file: Opened, report_found: Callable[[int], None]) -> Indexed:
        """Return what the shard has."""
        members = read_members(file.path, file.pread, file.file_bytes, report_found)
        self.links, self.has_end = members.links, members.has_end
        found = dict[str, tuple[int, int]]()
        seen, current = set[bytes](), b""
        for index, name in enumerate(members.names):
            parts = key_and_ending(name)
            if parts is None:
                continue
            key, ending = parts
            if key != current or not seen:
                if key in seen:
                    raise DataError(
                        f"{self.path}: members of {os.fsdecode(key)} lie apart, with those of other keys between "
                        "them: write the shard anew, sorted by name (tar --sort=name)"
                    )
                if seen:
                    self._end(members, current, found)
                current, found = key, {}
                seen.add(key)
            if ending in self._fields:
                self._take(members, found, index, *self._fields[ending])
        if seen:
            self._end(members, current, found)
        if not self._keys:
            wanted = ", ".join(os.fsdecode(ending) for ending in self._fields)
            raise DataError(
                f"{self.path} has {format_count(len(members.names), 'member')} but none that ends in {wanted} behind "
                "the first dot of its name: give other fields, or leave the shard out"
            )
        tables = np.array(self._rows, np.int64).reshape(len(self._rows), len(self._names), 3)
        return Indexed(
            file,
            self._keys,
            np.array(self._begins, np.int64),
            np.array(self._sizes, np.int64),
            {name: tables[:, number].copy() for number, name in enumerate(self._names)},
        )

    def _take(
        self, members: Members, found: dict[str, tuple[int, int]], index: int, field: str, which: int
    ) -> None:
        before = found.get(field)
        if before is not None and before[0] == which:
            raise member_twice(self.path, members, before[1], index)
        if before is None or which < before[0]:
            found[field] = which, index

    def _end(self, members: Members, key: bytes, found: Mapping[str, tuple[int, int]]) -> None:
        """Add a key whose members have all been seen."""
        if not found:
            self.left_out.append(key)
            return
        places = [members.offsets[index] for _, index in found.values()]
        ends = [members.offsets[index] + members.sizes[index] for _, index in found.values()]
        begin = min(places)
        row = []
        for name in self._names:
            which, index = found.get(name, (0, -1))
            row.append(
                (-1, 0, 0) if index < 0 else (members.offsets[index] - begin, members.sizes[index], which)
            )
        self._keys.append(key)
        self._begins.append(begin)
        self._sizes.append(max(ends) - begin)
        self._rows.append(row)
