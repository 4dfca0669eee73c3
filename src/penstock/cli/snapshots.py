"""`penstock snapshots`: what is in a store, whether it is intact, and what to do about it."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import snapshot_files, snapshot_predict, snapshot_study
from penstock.cli.output import Table, add_command, add_output_options, report_to, show
from penstock.errors import ConfigError, FormatError
from penstock.units import format_bytes, format_count, parse_rate

if TYPE_CHECKING:
    from penstock.checkpoint.inspecting import Listed

_OF_SNAPSHOTS = """
JSON: results[], the snapshots in the order in which they were saved, each with step, condition ("intact", "torn",
"damaged", "newer"), why, created_seconds (since 1970), reference_step (null for a baseline), raw_bytes,
stored_bytes, codec, kept_mantissa_bits (null unless it is lossy), tiers, broken_tiers (those whose copy is damaged).
"""


def add_snapshots(commands: Any) -> None:
    group: argparse.ArgumentParser = commands.add_parser(
        "snapshots", help="list, verify, move, study and predict the snapshots of a training"
    )
    kinds = group.add_subparsers(required=True, metavar="WHAT")
    listed = _command(kinds, "list", "what is there, and whether its files are complete", _list)
    listed.description = "Opens each snapshot, without reading it to its end."
    verify = _command(kinds, "verify", "read and decode every copy; exit status 1 if any is damaged", _verify)
    verify.add_argument("--step", type=int, metavar="N", help="training step of the only snapshot to verify")
    delete = _command(kinds, "delete", "delete a snapshot that no delta depends on", _delete)
    delete.add_argument("--step", type=int, metavar="N", required=True, help="training step of the snapshot")
    drain = _command(kinds, "drain", "copy what a training left on a fast tier to its folder", _drain)
    drain.add_argument("--rate", metavar="RATE", help='write at most so much, such as "100 MB/s"')
    for command in (snapshot_files, snapshot_study, snapshot_predict):
        command.add(kinds)


#: Of each command, what its example adds to the folder, and what its JSON holds.
_EPILOGS = {
    "list": ("", _OF_SNAPSHOTS),
    "verify": (" --fast /local/run", _OF_SNAPSHOTS),
    "delete": (" --step 400", "JSON: results[] of one snapshot: step.\n"),
    "drain": (
        ' --fast /local/run --rate "100 MB/s"',
        "JSON: results[], the snapshots as they lie afterwards: step, stored_bytes, tiers.\n",
    ),
}


def _command(kinds: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    example, more = _EPILOGS[name]
    epilog = f"Example: penstock snapshots {name} snapshots{example}\n{more}"
    parser = add_command(kinds, name, run, text, epilog=epilog)
    parser.add_argument(
        "folder", metavar="DIR", help="folder of the store, or an address such as s3://bucket/runs/a"
    )
    needs_fast = name == "drain"
    parser.add_argument(
        "--fast", type=Path, metavar="DIR", required=needs_fast, help="fast tier of the store, if it has one"
    )
    add_output_options(parser, plot=False)
    return parser


def _list(options: argparse.Namespace) -> None:
    with snapshot_files.open_store(options.folder, options.fast) as store:
        listed = store.list()
    _show(options, listed, "" if listed else "no snapshot is there")


def _verify(options: argparse.Namespace) -> None:
    with snapshot_files.open_store(options.folder, options.fast) as store:
        listed = store.verify(options.step)
    broken = [one for one in listed if one.condition != "intact"]
    half = [one for one in listed if one.condition == "intact" and one.broken_tiers]
    text = f"{format_count(len(listed), 'snapshot')} read and decoded"
    size = format_bytes(sum(one.raw_bytes for one in listed))
    _show(options, listed, "" if broken or half or not listed else f"{text} ({size}): all intact")
    if not listed:
        raise ConfigError(f"no snapshot is there: {options.folder} has nothing to verify")
    if broken:
        raise FormatError(f"{len(broken)} of {len(listed)} snapshots cannot be restored: {broken[0].why}")
    if half:
        raise FormatError(
            f"{len(half)} of {len(listed)} snapshots have a damaged copy, and can be restored from another: "
            f"step {half[0].step:,}: {half[0].why}"
        )


def _delete(options: argparse.Namespace) -> None:
    with snapshot_files.open_store(options.folder, options.fast) as store:
        store.delete(options.step)
    show(options, {"results": [{"step": options.step}]}, [], [f"step {options.step} is deleted"])


def _drain(options: argparse.Namespace) -> None:
    from penstock.compiling import without_plain_forms

    rate = None if options.rate is None else parse_rate(options.rate)
    text: list[str] = []
    report = report_to(options)

    def collect(line: str) -> None:
        text.append(line)
        report(line)

    _check_fast(options.folder, options.fast)
    with (
        without_plain_forms(),
        snapshot_files.open_store(
            options.folder, options.fast, drain_bytes_per_second=rate, report=collect
        ) as store,
    ):
        store.drain()
        listed = store.list()
    results = [{"step": one.step, "stored_bytes": one.stored_bytes, "tiers": one.tiers} for one in listed]
    show(options, {"results": results}, [], [] if text else ["nothing to drain"])


def _check_fast(folder: str, fast: Path) -> None:
    """Raise ConfigError if no store has used a fast tier's folder: a mistyped one would look empty."""
    from penstock.checkpoint.files.fast_folders import holds_store, remembered
    from penstock.checkpoint.tiers.local import LocalTier

    snapshot_files.check_store(folder, fast)
    if not holds_store(fast):
        known = [] if "://" in folder else remembered(LocalTier(folder))
        was = f", {' or '.join(one.path for one in known)}" if known else ""
        raise ConfigError(f"{fast} holds no snapshots: name the folder that the training gave as fast={was}")


def _difference_to(one: Listed) -> str:
    if not one.codec:  # nobody can read what it is
        return "?"
    return "-" if one.reference_step is None else f"{one.reference_step:,}"


def _where(one: Listed) -> str:
    # Where all are, the condition says it.
    broken = one.broken_tiers if one.condition == "intact" else ()
    return ", ".join(f"{name} (damaged)" if name in broken else name for name in one.tiers)


def _show(options: argparse.Namespace, listed: list[Listed], closing: str) -> None:
    rows = [
        (
            f"{one.step:,}",
            one.condition,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.created_seconds)) if one.codec else "?",
            _difference_to(one),
            format_bytes(one.raw_bytes),
            format_bytes(one.stored_bytes),
            f"{one.stored_bytes / one.raw_bytes:.1%}" if one.raw_bytes else "",
            one.codec + ("" if one.kept_mantissa_bits is None else f", lossy: {one.kept_mantissa_bits} bits"),
            _where(one),
        )
        for one in listed
    ]
    columns = ("step", "condition", "saved", "difference to", "state", "stored", "share", "codec", "where")
    notes = [f"step {one.step:,}: {one.why}" for one in listed if one.why]
    show(
        options,
        {"results": list(map(asdict, listed))},
        [Table("", columns, rows)] if rows else [],
        [*notes, closing] if closing else notes,
    )
