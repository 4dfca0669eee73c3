"""The data set that a command reads, as `penstock.open_source` takes it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.store import Source


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


def opened_source(options: argparse.Namespace) -> Source:
    """Open what `add_source` was given. Raises: ConfigError for options that are none, or as `open_source`."""
    from penstock.store import open_source

    return open_source(options.source, storage_options=dict(map(_option, options.storage_options)))


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
