"""The data set that a command reads, as `penstock.open_source` takes it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.loader.tar_samples import TarSamples
    from penstock.store import Source

#: Options of the class that shards or tables are opened by.
_OF_SHARDS = {
    "member": "ending of the member of tar shards that is the sample, such as png or seg.png",
    "sample": "column or feature that is the sample, in Parquet, Arrow, TFRecord, MDS and LitData",
    "label": 'member, column or feature that is the label, such as json:class; several with commas; "" takes none',
}
#: What a file of JSON lines may be read as, and the class of `penstock.store` that does so.
_KINDS = {"manifest": "Manifest", "json-lines": "JsonLines"}


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="data set as a loader takes it: a folder, list, table, or shards"
    )
    parser.add_argument(
        "--storage-options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of an address's store, as in anon=true or endpoint_url=http://host:9000; once for each",
    )
    for name, what in _OF_SHARDS.items():
        parser.add_argument(f"--{name}", metavar="NAME", help=what)
    parser.add_argument(
        "--kind",
        choices=tuple(_KINDS),
        help="read JSON lines as a table of files, or as samples themselves; the first line decides unless given",
    )


def opened_source(options: argparse.Namespace) -> Source:
    """Open what `add_source` was given. Raises: ConfigError for options that are none, or as `open_source`."""
    from penstock import store

    given, of_store = options_of_shards(options), _storage_options(options)
    if options.kind is None:
        return store.open_source(options.source, storage_options=of_store, options=given)
    _refuse("kind", given)
    opened: Source = getattr(store, _KINDS[options.kind])(options.source, storage_options=of_store)
    return opened


def _refuse(name: str, given: dict[str, Any]) -> None:
    """Raise ConfigError if options are given that do not go with the one of this name."""
    if given:
        raise ConfigError(f"--{name} is given with --{next(iter(given))}: leave one of them out")


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Add what `opened_samples` takes besides `add_source`."""
    parser.add_argument(
        "--fields",
        metavar="ENDING,...",
        help="members of tar shards that are looked at, such as jpg,txt,json, all decoded by their endings; "
        '"all" takes those that the first key has',
    )
    parser.add_argument(
        "--optional",
        metavar="ENDING,...",
        help="those of --fields that a key may lack, as where a training has a default for them by optional=",
    )


def opened_samples(options: argparse.Namespace) -> Source | TarSamples:
    """Open all members that --fields names, or what `opened_source` opens. Raises: as that, and `TarSamples`."""
    from penstock.loader.tar_samples import TarSamples

    if options.fields is None:
        if options.optional is not None:
            raise ConfigError("--optional is of the members that --fields names: give --fields, too")
        return opened_source(options)
    _refuse("fields", options_of_shards(options) | ({} if options.kind is None else {"kind": options.kind}))
    return TarSamples(options.source, _fields_of(options), storage_options=_storage_options(options))


def optional_of(options: argparse.Namespace) -> list[str]:
    """Return which fields of what `opened_samples` opens a sample may lack."""
    return [] if options.optional is None else options.optional.split(",")


def _fields_of(options: argparse.Namespace) -> list[str] | None:
    """Return what `TarSamples` takes as `fields=`."""
    given: str = options.fields
    return None if given == "all" else given.split(",")


def _storage_options(options: argparse.Namespace) -> dict[str, Any]:
    return dict(map(_option, options.storage_options))


def options_of_shards(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `open_source` takes as `options=`; nothing where none is given."""
    given = {name: getattr(options, name) for name in _OF_SHARDS if getattr(options, name) is not None}
    if "label" in given:
        names = given["label"].split(",")
        given["label"] = names if len(names) > 1 else names[0] or None
    return given


def opening(options: argparse.Namespace) -> str:
    """Return how Python code gives a loader what `opened_source` or `opened_samples` opens."""
    if getattr(options, "fields", None) is not None:
        fields = "" if _fields_of(options) is None else f", {_fields_of(options)!r}"
        return f"TarSamples({options.source!r}{fields})"
    if options.kind is not None:
        return f"{_KINDS[options.kind]}({options.source!r})"
    more = options_of_shards(options)
    return f"open_source({options.source!r}, options={more!r})" if more else repr(options.source)


def _option(text: str) -> tuple[str, Any]:
    """Return name and value: what JSON has, such as true, 60 or {"region_name": "eu-west-1"}; any other is text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(
            "--storage-options takes KEY=VALUE, such as endpoint_url=http://host:9000, once for each option"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
