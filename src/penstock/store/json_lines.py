"""Files of JSON lines, each of which is a sample: conversations, instructions, documents of a language model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import numpy as np

from penstock.errors import DataError
from penstock.store.catalog import Catalog, Ints
from penstock.store.files import unreadable
from penstock.store.listing import Asking, ListingArguments
from penstock.store.packed_listing import (
    CataloguedFiles,
    Indexed,
    Opened,
    all_files_below,
    index_files,
    opened,
)
from penstock.store.patterns import Paths, place_of_paths
from penstock.store.remote import Objects
from penstock.store.text_rows import JSON_LINES

#: Read at a time to find the ends of lines.
_WINDOW_BYTES = 8 << 20
_END_OF_LINE = ord("\n")
#: A longer line is no entry of a table.
_MOST_ENTRY_BYTES = 1 << 20
#: How a file may begin that says it is UTF-8.
_MARK = b"\xef\xbb\xbf"


class JsonLines(CataloguedFiles):
    """The lines of files of JSON lines (.jsonl, .ndjson), each an object that is a sample; empty lines are left out.

    Where lines begin is found once, by reading the files, and kept as a catalog; what is in them is read when a sample
    is. A loader without transforms, or `penstock.loader.SourceSamples`, gives dicts, as `json.loads` does.

    paths: a path, a pattern such as "part-*.jsonl", a folder of such files, or a list of these.
    refresh, calls, catalog, storage_options: as in `open_source`.

    Raises: DataError naming the file if it is missing, compressed, or has no lines; when a sample is read, naming the
        line that is no object of JSON.
    """

    #: Samples are text, of JSON.
    is_text = is_json = True

    def __init__(self, paths: Paths, **listing: Unpack[ListingArguments]) -> None:
        place = place_of_paths(paths)
        super().__init__(place, partial(list_lines, place), listing)


def files_of_lines(place: str, objects: Objects | None) -> tuple[str, ...]:
    """Return the files that a place, of `place_of_paths`, is. Raises: DataError where a folder has none."""
    return all_files_below(place, [JSON_LINES], "files of JSON lines", objects, are_any_named=True)


def first_entry(path: str, objects: Objects | None) -> dict[str, Any]:
    """Return the object of the first line of a file that is not empty; {} where it is none, or longer than 1 MiB.

    Raises: DataError for a file that cannot be read.
    """
    with opened(path, objects) as file:
        try:
            front = file.pread(_MOST_ENTRY_BYTES, 0)
        except OSError as error:
            raise unreadable(path, error) from error
        lines = front.removeprefix(_MARK).split(b"\n")
        if len(front) < file.nbytes:
            lines.pop()  # which may go on
    line = next((each for each in lines if each.strip()), b"")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # reading the sample, or the table, says what is wrong
        return {}
    return entry if isinstance(entry, dict) else {}


def list_lines(place: str, asking: Asking) -> Catalog:
    """Find the lines of files; see `JsonLines`. Of those that did not change, what an old catalog says is taken."""
    files = asking.calls.one(place, partial(files_of_lines, place, asking.objects))

    def index(file: Opened) -> Indexed:
        return _index(file, partial(asking.found, file.path))

    return index_files(asking, files, index, kind="JsonLines", label=None)


def _index(file: Opened, report_found: Callable[[int], None]) -> Indexed:
    """Return where the lines of a file are that are not empty."""
    ends, at = list[Ints](), 0
    try:
        front = file.pread(len(_MARK), 0)
        while at < file.file_bytes and (window := file.pread(_WINDOW_BYTES, at)):
            ends.append(at + np.flatnonzero(np.frombuffer(window, np.uint8) == _END_OF_LINE))
            report_found(ends[-1].size)
            at += len(window)
    except DataError:
        raise
    except OSError as error:
        raise unreadable(file.path, error) from error
    if front[:2] in (b"\x1f\x8b", b"BZ", b"\x28\xb5"):
        raise DataError(
            f"{file.path} is compressed, so that no line can be read without all before it: unpack it once"
        )
    first = len(_MARK) if front == _MARK else 0
    last = np.concatenate([*ends, [at]]).astype(np.int64)
    begins = np.concatenate(([first], last[:-1] + 1))
    sizes = last - begins
    which = np.flatnonzero(sizes > 1)  # less is no object
    if not which.size:
        raise DataError(f"{file.path} has no lines: take it out, or write it again")
    return Indexed(
        file, [b"line %d" % (number + 1) for number in which.tolist()], begins[which], sizes[which], None
    )
