"""`penstock catalog`: which listings of data sets are kept, and how to remove them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.cli.output import Table, add_command, add_output_options, show
from penstock.errors import ConfigError, DataError
from penstock.units import format_bytes, format_count

if TYPE_CHECKING:
    from penstock.store.catalog import Catalog
    from penstock.store.catalogs import KeptCatalog

_DESCRIPTION = """\
Lists the catalogs: what was found in a folder, list file or tar shards, kept for the next start. With SOURCE those of
one data set alone, and its labels. See docs/howto/list-once.md.
"""
_EPILOG = """\
examples:
  penstock catalog
  penstock catalog photos/train --json
  penstock catalog photos/train --clear

JSON: results[], of each catalog file, file_bytes, used_seconds (since 1970), problem (why it cannot be read, else
null); and, null where it cannot be read, source, opener (which class or function listed it), extensions[], kind,
samples, data_bytes, folders, labels, listed_seconds (since 1970).
"""


def add_catalog(commands: Any) -> None:
    summary = "list or clear what is kept of the listings of data sets"
    parser = add_command(commands, "catalog", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", help="a folder, list file or pattern of shards (default: all)"
    )
    parser.add_argument(
        "--clear", action="store_true", help="remove them; the next start lists the files anew"
    )
    add_output_options(parser, plot=False)


def _run(options: argparse.Namespace) -> None:
    from penstock.store.catalogs import catalog_folders, kept_catalogs, place_of
    from penstock.store.patterns import place_of_paths

    kept = list(kept_catalogs())
    if options.source is not None:
        place = place_of(place_of_paths(options.source))
        kept = [one for one in kept if one.catalog is not None and one.catalog.key.place == place]
        if not kept:
            raise ConfigError(
                f"no catalog of {options.source} is kept; penstock catalog lists those that are"
            )
    if options.clear:
        kept = [one for one in kept if not one.file.is_dir()]  # nobody's catalog: it stays
        for one in kept:
            try:
                one.file.unlink(missing_ok=True)
            except OSError as error:
                raise DataError(f"{one.file} cannot be removed: {error.strerror or error}") from error
    tables = [
        Table(
            "",
            ("data set", "kind", "opened by", "folders", "samples", "size", "listed", "used", "catalog"),
            _rows(kept),
        )
    ]
    if options.source is not None:
        tables += [_labels(one) for one in kept]
    places = " and ".join(map(str, catalog_folders()))
    notes = [f"{one.file} {one.problem}" for one in kept if one.problem]
    if options.clear:
        tables, notes = [], [f"removed {format_count(len(kept), 'catalog')} of {places}"]
    elif not kept:
        tables, notes = [], [f"no catalog is kept in {places}"]
    else:
        notes.append(f"kept in {places}")
    show(options, {"results": [_as_json(one) for one in kept]}, tables, notes)


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


def _as_json(one: KeptCatalog) -> dict[str, Any]:
    return {
        name: one.catalog if one.catalog is None else of(one.catalog) for name, of in _OF_CATALOG.items()
    } | {
        "file": str(one.file),
        "file_bytes": one.file_bytes,
        "used_seconds": one.used_seconds,
        "problem": one.problem or None,
    }
