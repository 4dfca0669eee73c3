"""`penstock cache`: which samples local disks keep, and how to remove them."""

from __future__ import annotations

import argparse
import time
from typing import Any

from penstock.cli.output import Table, add_command, add_output_options, show
from penstock.errors import DataError
from penstock.units import format_bytes, format_count

_EPILOG = """\
Example: penstock cache {name} /scratch/penstock
See docs/howto/local-disk.md.

JSON: results[], of each tier{those}, path, data (what it is of; "" where its header is damaged), disk_bytes,
used_seconds (since 1970), is_used (by a process, now).
"""


def add_cache(commands: Any) -> None:
    group = commands.add_parser("cache", help="list or clear the samples that loaders keep on a local disk")
    kinds = group.add_subparsers(required=True, metavar="WHAT")
    for name, summary, those in (
        ("list", "what is there, and who uses it", ""),
        ("clear", "remove what no process uses", " that was removed"),
    ):
        parser = add_command(kinds, name, _run, summary, epilog=_EPILOG.format(name=name, those=those))
        parser.add_argument("folder", metavar="FOLDER", help="folder that loaders were given as local_disk")
        parser.set_defaults(clear=name == "clear")
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
