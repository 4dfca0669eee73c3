"""`penstock cache`: which samples local disks keep, and how to remove them."""

from __future__ import annotations

import argparse
import time
from typing import Any

from penstock.cli.output import Table, add_command, add_output_options, show
from penstock.errors import DataError
from penstock.units import format_bytes, format_count

_DESCRIPTION = """\
Lists what loaders keep in a folder on a local disk (local_disk= of Loader). See docs/howto/local-disk.md.
"""
_EPILOG = """\
examples:
  penstock cache /scratch/penstock
  penstock cache /scratch/penstock --clear

JSON: results[], of each tier, path, data (what it is of; "" where its header is damaged), disk_bytes, used_seconds
(since 1970), is_used (by a process, now).
"""


def add_cache(commands: Any) -> None:
    summary = "list or clear the samples that a local disk keeps"
    parser = add_command(commands, "cache", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("folder", metavar="FOLDER", help="the folder that loaders were given as local_disk")
    parser.add_argument("--clear", action="store_true", help="remove those that no process uses")
    add_output_options(parser, plot=False)


def _run(options: argparse.Namespace) -> None:
    from penstock.store.disk import disk_tiers, remove_tier

    try:
        found = disk_tiers(options.folder)
        removed = [each for each in found if options.clear and remove_tier(each.path)]
    except OSError as error:
        done = "cleared" if options.clear else "read"
        raise DataError(f"{options.folder} cannot be {done}: {error.strerror or error}") from error
    if options.clear:
        nbytes = format_bytes(sum(each.nbytes for each in removed))
        in_use = len(found) - len(removed)
        notes = [f"removed {format_count(len(removed), 'tier')}, {nbytes}"]
        notes += (
            [f"{format_count(in_use, 'tier')} in use: end the loaders that use them first"] if in_use else []
        )
        found = removed
    else:
        notes = [] if found else [f"{options.folder} keeps no samples"]
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
            "path": str(each.path),
            "data": each.about,
            "disk_bytes": each.nbytes,
            "used_seconds": each.used_seconds,
            "is_used": each.is_used,
        }
        for each in found
    ]
    tables = [] if options.clear or not found else [Table("", ("data", "size", "used", "tier"), rows)]
    show(options, {"results": results}, tables, notes)
