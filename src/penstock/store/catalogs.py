"""Where catalogs are kept between runs: one file for each data set and way to list it.

They are in `catalogs` of Penstock's folder for caches (`penstock.cache_folders`). A catalog is read as a whole, not
mapped: whoever replaces or removes the file, on this host or on another that shares it, ends no run that uses it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import xxhash

from penstock.cache_folders import Folders, find_folders, remove_unused
from penstock.errors import FormatError, PenstockError
from penstock.files import write_whole
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog, CatalogKey, NewerCatalog, check_front, read_key
from penstock.store.object_store import is_address, without_secrets

#: A smaller data set is listed faster than it is worth a file: in some 10 ms, and at 1 ms a call in 0.1 s.
LEAST_SAMPLES = 1000
_UNUSED_DAYS = 90
_ENDING = ".catalog"
#: Of a catalog's file, enough for `check_front`.
_FRONT_BYTES = 64


class KeptCatalog(NamedTuple):
    """A file of a catalog. catalog: None where it cannot be read; problem: why."""

    file: Path
    file_bytes: int
    used_seconds: float
    catalog: Catalog | None
    problem: str


def read_catalog(key: CatalogKey, calls: Calls) -> Catalog | None:
    """Return the catalog that is kept of a data set, if any. One that cannot be used is reported."""
    for folder in calls.one("the folder of catalogs", _folders).read:
        file = folder / _name_of(key)
        try:
            catalog = Catalog.from_bytes(calls.one(str(file), file.read_bytes))
            if catalog.key != key:
                raise FormatError(f"is of {catalog.key.place}")
        except FormatError as problem:
            calls.report(f"the catalog of {key.place} in {file} {problem}: the data set is listed anew")
        except PenstockError:  # such as a disk that does not answer in time
            raise
        except OSError:  # nothing is there, or a disk fails
            continue
        else:
            with contextlib.suppress(OSError):
                os.utime(file)
            return catalog
    return None


def keep_catalog(catalog: Catalog, calls: Calls) -> str | None:
    """Keep a catalog for the next run; return why that could not be done, or None.

    One of a later Penstock is left alone, and a small data set's is not kept.
    """
    if len(catalog) < LEAST_SAMPLES:
        return None
    folders = calls.one("the folder of catalogs", _folders)
    folder = folders.kept
    if folders.note:
        calls.report(f"{folders.note}: the catalog of {catalog.key.place} is kept in {folder or 'no folder'}")
    if folder is None:
        return "no folder for it can be written: give one that can be, as PENSTOCK_CACHE"
    file = folder / _name_of(catalog.key)
    try:
        calls.one(str(file), partial(_write, file, catalog.to_bytes()))
    except PenstockError:
        raise
    except OSError as error:
        return f"{file} cannot be written: {error.strerror or error}"
    return None


def catalog_folders() -> tuple[Path, ...]:
    """Return where catalogs are looked for, the first place first."""
    return _folders().read


def kept_catalogs(place: str | None = None) -> Iterator[KeptCatalog]:
    """Yield the catalogs of a place, as `place_of` returns it; None: all, those that cannot be read included."""
    for folder in _folders().read:
        for file in sorted(folder.glob(f"*{_ENDING}")):
            if place is not None and not _is_of(file, place):
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                used_seconds, data = file.stat().st_mtime, b""
                catalog, problem = None, ""
                try:
                    data = file.read_bytes()
                    catalog = Catalog.from_bytes(data)
                except FileNotFoundError:
                    raise
                except FormatError as error:
                    problem = str(error)
                except OSError as error:  # such as a folder of that name
                    problem = f"cannot be read: {error.strerror or error}"
                yield KeptCatalog(file, len(data), used_seconds, catalog, problem)


def _is_of(file: Path, place: str) -> bool:
    """Return whether a file is a catalog of a place; what cannot be read is of none."""
    try:
        with file.open("rb") as there:
            return read_key(there).place == place
    except (FormatError, OSError):
        return False


def place_of(path: str | os.PathLike[str]) -> str:
    """Return the real path by which the catalogs of a folder or list file are known; an address as it is."""
    if is_address(os.fspath(path)):
        return without_secrets(os.fspath(path))
    folder, name = os.path.split(path := os.path.abspath(os.path.expanduser(path)))
    # A list that is a link: its paths are relative to the folder of the link.
    return os.path.realpath(path) if os.path.isdir(path) else os.path.join(os.path.realpath(folder), name)


def _write(file: Path, data: bytes) -> None:
    with contextlib.suppress(FileNotFoundError, FormatError):
        try:
            with open(file, "rb") as there:
                check_front(there.read(_FRONT_BYTES))
        except NewerCatalog:
            return
    write_whole(file, data)
    remove_unused(file.parent, _UNUSED_DAYS)


def _name_of(key: CatalogKey) -> str:
    return xxhash.xxh3_128_hexdigest(repr(key).encode("utf-8", "surrogateescape")) + _ENDING


def _folders() -> Folders:
    return find_folders("catalogs", least_bytes=16 << 20)
