"""Samples of tar shards with all their members: dicts, whose fields are decoded by the endings of their names."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, reason_of
from penstock.loader.resume import describe_object
from penstock.loader.source_samples import ReadSamples, read_samples
from penstock.loader.structure import as_json_leaf
from penstock.loader.transforms.decoders import Decoders, Picture
from penstock.loader.transforms.geometry import Box
from penstock.loader.transforms.joint import decode_mask
from penstock.store import Selection, Source
from penstock.store.listing import IMAGE_EXTENSIONS, ListingArguments
from penstock.store.members import Member, TarMembers, check_wanted
from penstock.store.patterns import Paths
from penstock.store.shards import json_field, read_array

#: Makes a value of a member's bytes.
Decode = Callable[[bytes], Any]


class TarSamples(ReadSamples):
    """The samples of tar shards in the convention of WebDataset, with several members each: dicts, by field.

    shards: as in `penstock.store.TarShards`; compressed ones are refused.
    fields: endings of members by names of yours, {"image": "jpg;png", "caption": "txt", "label": "cls"}, of several the
        first that a key has; "json:class" or "json:outer.inner" is a field of JSON. Or a list of endings, which name
        themselves. None takes all that the first key of the first shard has, by their endings.
    decode: how members become values, by field: a word, or a function of bytes. By the last part of their ending
        unless given. "rgb" is uint8[height, width, 3], as of jpg, png and all other pictures; "mask" the class of each
        pixel, [height, width]; "text" a str (txt, text, transcript); "int" an integer (cls, cls2, class, count, index,
        inx, id); "json" whatever it has, objects and arrays in a list of the batch (json, jsn); "npy" the array of
        numbers that `numpy.save` wrote (npy); "bytes" bytes (all others).
    refresh, calls, catalog, storage_options: as in `penstock.open_source`.

    A field whose member a key lacks is left out of its sample, for which a loader takes a default by `optional=`; keys
    without any are left out and reported. Members of a sample are read by one read.

    Raises: ConfigError for other fields and words, and for a field that no key has; DataError as `TarShards`, and
        naming the key whose members lie apart; when a sample is read, naming the member that is not what its field
        says.
    """

    def __init__(
        self,
        shards: Paths,
        fields: Mapping[str, str] | Sequence[str] | None = None,
        *,
        decode: Mapping[str, str | Decode] | None = None,
        **listing: Unpack[ListingArguments],
    ) -> None:
        wanted, self._paths = (None, {}) if fields is None else _parted(fields)
        self._members = members = TarMembers(shards, wanted, **listing)
        #: What is read: these, or a selection of them.
        self.source: Source = members
        self._decode = dict(decode or {})
        known = [field for field in members.wanted if field not in self._paths]
        for field, how in self._decode.items():
            if field not in members.wanted or field in self._paths:
                raise ConfigError(f"decode has {field!r}; fields that are members are {', '.join(known)}")
            if not callable(how) and how not in DECODERS:
                raise ConfigError(
                    f"decode has {how!r:.80} for {field!r}; it is one of {', '.join(DECODERS)}, or a function of bytes"
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._members.place!r}): {len(self):,} samples"

    def __getitems__(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        return [
            self._fields_of(sample % len(self), data.data)
            for sample, data in zip(samples, read_samples(self.source, samples), strict=True)
        ]

    @property
    def endings(self) -> list[str]:
        """Endings of the members that are its fields."""
        return [ending for endings in self._members.wanted.values() for ending in endings]

    @property
    def described(self) -> list[str]:
        """Its fields with the endings of their members and how these become values, sorted by name."""
        found = []
        for field, endings in self._members.wanted.items():
            if paths := self._paths.get(field):
                found += [f"{name}: json:{path}" for name, path in paths.items()]
                continue
            usual = list(map(usual_decoder, endings))
            how: Sequence[str | Decode] = [self._decode[field]] if field in self._decode else usual
            words = dict.fromkeys(each if isinstance(each, str) else describe_object(each) for each in how)
            found.append(f"{field}: {';'.join(endings)} as {' or '.join(words)}")
        return sorted(found)

    def over(self, source: Source) -> TarSamples:
        part = copy.copy(self)
        part.source = source
        return part

    @property
    def fields(self) -> list[str]:
        """The names of its fields."""
        return self._names_of(self._members.wanted)

    def lacking(self, sample: int) -> list[str]:
        """Return the fields whose members the key of a sample does not have."""
        there = {member.field for member in self._members_of(sample)}
        return self._names_of(field for field in self._members.wanted if field not in there)

    def _names_of(self, members: Iterable[str]) -> list[str]:
        return [name for member in members for name in self._paths.get(member, [member])]

    def _members_of(self, sample: int) -> Iterator[Member]:
        return self._members.members_of(
            int(self.source.ids[sample]) if isinstance(self.source, Selection) else sample
        )

    def _fields_of(self, sample: int, data: memoryview) -> dict[str, Any]:
        made = dict[str, Any]()
        for field, ending, begin, end in self._members_of(sample):
            how, paths = self._decode.get(field) or usual_decoder(ending), self._paths.get(field)
            try:
                value = (how if callable(how) else DECODERS[how])(bytes(data[begin:end]))
                made |= _json_fields(value, paths) if paths else {field: value}
            except Exception as error:
                instead = f"give another decode= for {field!r}"
                if paths:
                    instead = f"leave {', '.join(map(repr, paths))} out of fields="
                raise _misread(f"{self.source.describe(sample)}.{ending}", how, error, instead) from error
        return made


def decode_member(name: str, content: bytes) -> Any:
    """Return a member as the ending of its name says. Raises: DataError naming it."""
    how = usual_decoder(name)
    try:
        return DECODERS[how](content)
    except Exception as error:
        raise _misread(name, how, error, "leave its sample out") from error


def _misread(name: str, how: str | Decode, error: Exception, instead: str) -> DataError:
    word = "decode= of it" if callable(how) else how
    return DataError(f"{name}, taken as {word}: {reason_of(error):.300}; correct it, or {instead}")


def _parted(
    fields: Mapping[str, str] | Sequence[str],
) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, str]]]:
    """Return the wanted members; and of each member of JSON, the paths of its wanted fields, by their names.

    Raises: ConfigError as `check_wanted`; for a member that two fields want.
    """
    if not isinstance(fields, Mapping) and isinstance(fields, Sequence) and not isinstance(fields, str):
        fields = dict(zip(fields, fields, strict=True))
    plain, paths = dict[str, Any](), dict[str, dict[str, str]]()
    for name, text in fields.items() if isinstance(fields, Mapping) else ():
        ending, colon, path = text.partition(":") if isinstance(text, str) else ("", "", "")
        if colon and path and ending.lstrip(".").lower() == "json":
            paths.setdefault("json:", {})[name] = path
        else:
            plain[name] = text
    wanted = check_wanted(plain | dict.fromkeys(paths, "json") or fields)
    by_ending = dict[str, str]()
    for name, endings in wanted.items():
        for ending in endings:
            if (other := by_ending.setdefault(ending, name)) != name:
                one, two = (next(iter(paths.get(each, [each]))) for each in (other, name))
                raise ConfigError(
                    f"fields has .{ending} for {one!r} and {two!r}: a member is one field; take fields of JSON as "
                    '"json:NAME", each by its own name'
                )
    return wanted, paths


# -- From bytes to values -------------------------------------------------------------------------------------------

_threads = threading.local()


def _picture_of(content: bytes) -> NDArray[np.uint8]:
    decoders: Decoders | None = getattr(_threads, "decoders", None)
    if decoders is None:
        decoders = _threads.decoders = Decoders()
    picture = Picture(content, decoders)
    return picture.decode(Box(0, 0, picture.height, picture.width), 1).array.copy()


def _mask_of(content: bytes) -> NDArray[Any]:
    return decode_mask(np.frombuffer(content, np.uint8))


def _json_of(content: bytes) -> Any:
    return as_json_leaf(json.loads(content))


def _json_fields(value: Any, paths: Mapping[str, str]) -> dict[str, Any]:
    made = {}
    for name, path in paths.items():
        try:
            made[name] = as_json_leaf(json_field(value, path))
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(f"it has no field {path!r}, the path of {name!r}") from error
    return made


#: By word, what makes a value of a member's bytes.
DECODERS: dict[str, Decode] = {
    "rgb": _picture_of,
    "mask": _mask_of,
    "text": lambda content: content.decode("utf-8"),
    "int": lambda content: int(content.decode("utf-8")),
    "json": _json_of,
    "npy": read_array,
    "bytes": bytes,
}
#: By the last part of an ending. Source: webdataset 1.0, `autodecode.py`.
_BY_ENDING = {
    **{ending[1:]: "rgb" for ending in IMAGE_EXTENSIONS},
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), "int"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "npy",
}


def usual_decoder(name: str) -> str:
    """Return which of `DECODERS` the ending of a member's name stands for.

    >>> usual_decoder("0001.seg.PNG"), usual_decoder("cls"), usual_decoder("a.pickle")
    ('rgb', 'int', 'bytes')
    """
    return _BY_ENDING.get(name.rpartition(".")[2].lower(), "bytes")
