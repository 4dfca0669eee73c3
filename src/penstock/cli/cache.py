"""`penstock cache`: what is kept of data sets, catalogs and samples on local disks, and how to remove it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli.output import Table, add_command, add_output_options, show
from penstock.errors import ConfigError, DataError
from penstock.units import format_bytes, format_count

if TYPE_CHECKING:
    from penstock.store.catalog import Catalog
    from penstock.store.catalogs import KeptCatalog
    from penstock.store.disk import TierFacts

_DESCRIPTION = """\
Catalogs keep what was found in a folder, list file or tar shards for the next start (docs/howto/list-once.md). Loaders
keep samples on a local disk (docs/howto/local-disk.md). PLACE is a data set, for its catalogs and labels, or a local
disk, for the samples there; both where it is both. {without}
"""
_EPILOG = """\
examples:
  penstock cache {name} photos/train
  penstock cache {name} /scratch/penstock
  penstock cache {name} {every}

JSON: results[], what {is_there}; what says "catalog" or "samples".
A catalog has file, file_bytes, used_seconds (since 1970), problem (why it cannot be read, else null); and, null where
it cannot be read, source, opener (which class or function listed it), extensions[], kind, samples, data_bytes,
folders, labels, listed_seconds (since 1970).
Samples have path, data (what they are of; "" where their header is damaged), disk_bytes, used_seconds (since 1970),
is_used (by a process, now).
"""


def add_cache(commands: Any) -> None:
    group = commands.add_parser(
        "cache", help="list or clear what is kept: listings of data sets, samples on disks"
    )
    kinds = group.add_subparsers(required=True, metavar="WHAT")
    removes = "remove what is kept, but no samples that a process uses now"
    for name, summary, is_there, every, without in (
        ("list", "what is there, and when it was used", "is there", "--json", "Without PLACE: all catalogs."),
        ("clear", removes, "was removed", "--all-catalogs", "One of PLACE and --all-catalogs is needed."),
    ):
        description = _DESCRIPTION.format(without=without)
        epilog = _EPILOG.format(name=name, is_there=is_there, every=every)
        parser = add_command(kinds, name, _run, summary, description, epilog)
        parser.add_argument(
            "place",
            metavar="PLACE",
            nargs="?",
            help="a folder, list file or pattern of shards, or the folder that loaders were given as local_disk",
        )
        parser.set_defaults(clear=name == "clear")
        if name == "clear":
            parser.add_argument(
                "--all-catalogs", action="store_true", help="remove the catalogs of all data sets"
            )
        add_output_options(parser, plot=False)


class _Shown(NamedTuple):
    """What is printed of catalogs, or of samples."""

    results: list[dict[str, Any]]
    tables: list[Table]
    notes: list[str]


def _run(options: argparse.Namespace) -> None:
    if options.clear and (options.place is None) != options.all_catalogs:
        raise ConfigError("give one of PLACE, whose catalogs or samples are removed, and --all-catalogs")
    kept = _catalogs(options.place)
    parts = [_shown_catalogs(options, kept)] if kept or options.place is None else []
    if options.place is not None and (not kept or os.path.isdir(options.place)):
        parts.append(_shown_tiers(options, has_catalogs=bool(kept)))
    results = [each for part in parts for each in part.results]
    tables = [each for part in parts for each in part.tables]
    show(options, {"results": results}, tables, [each for part in parts for each in part.notes])


# -- Catalogs ----------------------------------------------------------------------------------------------------


def _catalogs(place: str | None) -> list[KeptCatalog]:
    """Return the catalogs of a data set; None: all."""
    from penstock.store.catalogs import kept_catalogs, place_of
    from penstock.store.patterns import place_of_paths

    if place is None:
        return list(kept_catalogs())
    return [one for one in kept_catalogs(place_of(place_of_paths(place))) if one.catalog is not None]


def _shown_catalogs(options: argparse.Namespace, kept: list[KeptCatalog]) -> _Shown:
    from penstock.store.catalogs import catalog_folders

    if options.clear:
        kept = [one for one in kept if not one.file.is_dir()]  # nobody's catalog: it stays
        for one in kept:
            try:
                one.file.unlink(missing_ok=True)
            except OSError as error:
                raise DataError(f"{one.file} cannot be removed: {error.strerror or error}") from error
    columns = ("data set", "kind", "opened by", "folders", "samples", "size", "listed", "used", "catalog")
    tables = [Table("", columns, _rows(kept))]
    if options.place is not None:
        tables += [_labels(one) for one in kept]
    places = " and ".join(map(str, catalog_folders()))
    notes = [f"{one.file} {one.problem}" for one in kept if one.problem]
    if options.clear:
        tables, notes = [], [f"removed {format_count(len(kept), 'catalog')} of {places}"]
    elif not kept:
        tables, notes = [], [f"no catalog is kept in {places}"]
    else:
        notes.append(f"kept in {places}")
    return _Shown([_catalog_json(one) for one in kept], tables, notes)


def _rows(kept: list[KeptCatalog]) -> list[tuple[str, ...]]:
    from penstock.store.patterns import brief

    return [
        (
            brief(one.catalog.key.place) if one.catalog else f"? ({one.file.name})",
            one.catalog.kind if one.catalog else "?",
            one.catalog.key.opener if one.catalog else "?",
            f"{len(one.catalog.folders):,}" if one.catalog else "?",
            f"{len(one.catalog):,}" if one.catalog else "?",
            format_bytes(int(one.catalog.sizes_bytes.sum())) if one.catalog else "?",
            _ago(one.catalog.listed_seconds) if one.catalog else "?",
            _ago(one.used_seconds),
            format_bytes(one.file_bytes),
        )
        for one in kept
    ]


def _labels(one: KeptCatalog) -> Table:
    assert one.catalog is not None, "a catalog that cannot be read is of no data set"
    catalog = one.catalog
    if isinstance(catalog.labels, Mapping) or catalog.labels.ndim > 1 or not catalog.classes:
        return Table("", ("label", "type", "classes"), _named_labels(catalog))
    import numpy as np

    which = catalog.labels >= 0
    counts = np.bincount(catalog.labels[which], minlength=len(catalog.classes))
    sizes = np.bincount(
        catalog.labels[which], catalog.sizes_bytes[which].astype(float), minlength=len(catalog.classes)
    )
    rows = [
        (name, f"{count:,}", format_bytes(int(size)))
        for name, count, size in zip(catalog.classes, counts, sizes, strict=True)
    ]
    return Table("", ("label", "samples", "size"), rows)


def _named_labels(catalog: Catalog) -> list[tuple[str, ...]]:
    """Return a row for each label where they are not classes alone."""
    labels = catalog.labels if isinstance(catalog.labels, Mapping) else {"": catalog.labels}
    return [
        (
            name,
            f"{array.dtype}{list(array.shape[1:]) if array.ndim > 1 else ''}",
            f"{len(catalog.label_classes.get(name, catalog.classes)):,}",
        )
        for name, array in labels.items()
    ]


def _ago(seconds: float) -> str:
    """Return how long ago a time was, in the largest unit that fits."""
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if passed >= length:
            return f"{format_count(int(passed // length), unit)} ago"
    return "just now"


#: What JSON says of a catalog that can be read.
_OF_CATALOG: dict[str, Callable[[Catalog], Any]] = {
    "source": lambda catalog: catalog.key.place,
    "opener": lambda catalog: catalog.key.opener,
    "extensions": lambda catalog: catalog.key.extensions,
    "kind": lambda catalog: catalog.kind,
    "samples": len,
    "data_bytes": lambda catalog: int(catalog.sizes_bytes.sum()),
    "folders": lambda catalog: len(catalog.folders),
    "labels": lambda catalog: len(catalog.classes),
    "listed_seconds": lambda catalog: catalog.listed_seconds,
}


def _catalog_json(one: KeptCatalog) -> dict[str, Any]:
    return {
        "what": "catalog",
        **{name: one.catalog if one.catalog is None else of(one.catalog) for name, of in _OF_CATALOG.items()},
        "file": str(one.file),
        "file_bytes": one.file_bytes,
        "used_seconds": one.used_seconds,
        "problem": one.problem or None,
    }


# -- Samples on local disks --------------------------------------------------------------------------------------


def _shown_tiers(options: argparse.Namespace, *, has_catalogs: bool) -> _Shown:
    from penstock.store.disk import disk_tiers, remove_tier

    try:
        found: Sequence[TierFacts] = disk_tiers(options.place)
        removed = [each for each in found if options.clear and remove_tier(each.path)]
    except OSError as error:
        done = "cleared" if options.clear else "read"
        why = "" if has_catalogs else "no catalog of it is kept, and "
        why += f"as a folder of samples it cannot be {done}"
        raise DataError(f"{options.place}: {why}: {error.strerror or error}") from error
    if has_catalogs and not found:
        return _Shown([], [], [])
    if options.clear:
        nbytes = format_bytes(sum(each.nbytes for each in removed))
        in_use = len(found) - len(removed)
        notes = [f"removed {format_count(len(removed), 'tier')}, {nbytes}"]
        notes += (
            [f"{format_count(in_use, 'tier')} in use: end the loaders that use them first"] if in_use else []
        )
        found = removed
    else:
        notes = [] if found else [f"{options.place} keeps no samples, and no catalog of it is kept"]
    rows = [
        (
            each.about or "damaged",
            format_bytes(each.nbytes),
            "now" if each.is_used else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_seconds)),
            str(each.path),
        )
        for each in found
    ]
    results = [
        {
            "what": "samples",
            "path": str(each.path),
            "data": each.about,
            "disk_bytes": each.nbytes,
            "used_seconds": each.used_seconds,
            "is_used": each.is_used,
        }
        for each in found
    ]
    tables = [] if options.clear or not found else [Table("", ("data", "size", "used", "tier"), rows)]
    return _Shown(results, tables, notes)
