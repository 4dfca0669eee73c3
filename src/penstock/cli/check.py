"""`penstock check`: read and decode every sample once, and list the bad ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import check_folder
from penstock.cli.output import Table, add_command, add_output_options, long_work, show
from penstock.cli.source_options import add_fields, add_source, opened_samples, opening, optional_of
from penstock.errors import ConfigError
from penstock.units import format_count, format_names

if TYPE_CHECKING:
    from penstock.loader.skips import SkipList
    from penstock.loader.tar_samples import TarSamples
    from penstock.store import Source

_DESCRIPTION = """\
Reads and decodes every sample once, as a training would, and lists those that cannot be read. --write-skips
writes them to a file, whose samples Loader(..., skip=FILE) leaves out; after Ctrl-C or a kill the same command
continues.
See docs/howto/check-and-pack.md.
"""
_EPILOG = """\
examples:
  penstock check photos/train
  penstock check "shards/train-{000..099}.tar" --write-skips bad.jsonl --json
  penstock check shards --member "jpg;png" --label json:class
  penstock check shards --fields "jpg;png,seg.png,txt,json" --optional txt
  penstock check s3://bucket/train --storage-options anon=true --storage-options endpoint_url=http://host:9000

The exit status is 1 if a sample is bad, 130 after Ctrl-C.
JSON: source, samples, checked; lacking, of JSON lines, by key the number of those without it; and results[] of
sample, name, reason.
"""
_MOST_SHOWN, _MOST_KEYS = 100, 8


def add_check(commands: Any) -> None:
    summary = "read and decode every sample once, list the bad ones"
    parser = add_command(commands, "check", _run, summary, _DESCRIPTION, _EPILOG)
    add_source(parser)
    add_fields(parser)
    parser.add_argument(
        "--write-skips",
        type=Path,
        metavar="FILE",
        help="write the bad ones there; continue where it was left",
    )
    parser.add_argument(
        "--no-decode", action="store_true", help="read alone: whatever the bytes of samples are"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew where FILE exists")
    add_output_options(parser, plot=False)


def _run(options: argparse.Namespace) -> int:
    from penstock.loader.checking import check_source
    from penstock.loader.skips import SkipList
    from penstock.loader.source_samples import below

    if options.write_skips is not None:
        check_folder("--write-skips", options.write_skips)
    source = opened_samples(options)
    stored = below(source)
    found = _begun(options, stored) or SkipList.of(stored)
    try:
        with long_work(f"checking {options.source}", len(source), "samples") as done:
            check_source(
                source,
                decodes=not options.no_decode,
                optional=optional_of(options),
                found=found,
                keep=options.write_skips,
                done=done,
            )
    except KeyboardInterrupt:
        _show(options, found, source)
        raise
    _show(options, found, source)
    return 1 if found.bad else 0


def _begun(options: argparse.Namespace, source: Source) -> SkipList | None:
    """Return the list that an earlier run left. Raises: ConfigError if it is complete, or of another data set."""
    from penstock.loader.skips import SkipList

    path = options.write_skips
    if path is None or options.overwrite or not path.exists():
        return None
    found = SkipList.read(path)
    if not found.is_of(source):
        raise ConfigError(
            f"{path} is of another data set, or of this one before it changed: give another file, or --overwrite"
        )
    if found.is_complete:
        raise ConfigError(
            f"{path} is complete, {format_count(len(found.bad), 'bad sample')}: --overwrite checks anew"
        )
    return found


def _members_checked(options: argparse.Namespace, source: Source | TarSamples) -> list[str]:
    """Return a line that says which members of tar shards were looked at; nothing for other sources."""
    from penstock.loader.tar_samples import TarSamples
    from penstock.store import TarShards

    if isinstance(source, TarSamples):
        return [f"of each key, the members that end in {', '.join(source.endings)}"]
    if isinstance(source, TarShards):
        which = "picture" if options.member is None else f"member that ends in {options.member}"
        return [f"of each key, the {which} alone: --fields all checks the other members, too"]
    return []


def _keys_lacking(found: SkipList) -> list[str]:
    """Return a line that says which keys some lines of JSON lack; nothing where all have the same."""
    if not found.lacking:
        return []
    keys = (f"{key!r} ({format_count(count, 'line')})" for key, count in found.lacking.items())
    return [
        "lines lack keys that others have, for which a loader wants defaults by optional=: "
        f"{format_names(keys, _MOST_KEYS)}"
    ]


def _show(options: argparse.Namespace, found: SkipList, source: Source | TarSamples) -> None:
    bad = [found.bad[sample] for sample in sorted(found.bad)]
    rows = [
        (f"{each.sample:,}", each.reason if each.name in each.reason else f"{each.name}: {each.reason}")
        for each in bad
    ]
    tables = [Table("", ("sample", "what is wrong"), rows[:_MOST_SHOWN])] if bad else []
    of = "" if found.is_complete else f" of {found.samples:,}"
    notes = [f"{len(bad) - _MOST_SHOWN:,} more"] if len(bad) > _MOST_SHOWN else []
    notes.append(f"checked {found.checked:,}{of} samples, {len(bad):,} bad")
    notes += _members_checked(options, source) + _keys_lacking(found)
    if options.write_skips is not None:
        use = (
            f"Loader({opening(options)}, ..., skip={str(options.write_skips)!r}) leaves them out"
            if found.is_complete
            else "the same command continues"
        )
        notes.append(f"written to {options.write_skips}: {use}")
    data = {
        "source": options.source,
        "samples": found.samples,
        "checked": found.checked,
        "lacking": found.lacking,
        "results": [each._asdict() for each in bad],
    }
    show(options, data, tables, notes)
