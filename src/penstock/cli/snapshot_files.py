"""`penstock snapshots import`, `export`, `seal` and `check`: other people's checkpoints."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_size
from penstock.cli.output import Table, add_command, add_output_options, report_to, show
from penstock.errors import ConfigError, DataError
from penstock.report import print_report
from penstock.units import format_bytes, format_count

if TYPE_CHECKING:
    from penstock.checkpoint.store import SnapshotStore

_KINDS = """
kinds of files: .safetensors; .pt, .pth, .bin and .ckpt of torch.save; a folder as Hugging Face lays a model out, its
tensors shared out over files; .npy and .npz, which are read only. No code in a file is run.
"""
_OF_IMPORT = "JSON: results[] of one snapshot: step, file (that was read), store.\n"
_OF_EXPORT = "JSON: step, results[], the files that were written: file, bytes.\n"
_OF_SEAL = "JSON: seal, results[], the sealed files: file, bytes.\n"
_OF_CHECK = """
JSON: seal, files, bytes (of all files), and results[], the faults: file, wrong ("missing", "extra", "resized",
"changed", "unreadable"), why, begin and end (in bytes), tensors[].
"""
#: What says a step in a file's name, the surest first; the last is a number on its own.
_STEPS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?<![a-z])(?:step|iteration|iter)[-_=.]?(\d+)",
        r"(?<![a-z])(?:checkpoint|ckpt)[-_=.]?(\d+)",
        r"(?<![a-z])epoch[-_=.]?(\d+)",
        r"(?<![a-z\d.])(\d+)(?![a-z\d])",
    )
)


def add(commands: Any) -> None:
    text, example = "save other people's checkpoint as a snapshot", "model.safetensors snapshots --step 400"
    load = _command(commands, "import", text, _import, example, _KINDS + _OF_IMPORT)
    load.add_argument("file", type=Path, metavar="FILE", help="file or folder to read")
    load.add_argument("folder", metavar="DIR", help="folder of the store; created if it is missing")
    load.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="training step of the snapshot (the step in the file's name, or else 0)",
    )
    load.add_argument("--part", metavar="NAME", help="name of its part in the state, such as model")

    text, example = "write a snapshot as other people read it", "snapshots model.safetensors --part model"
    save = _command(commands, "export", text, _export, example, _KINDS + _OF_EXPORT)
    save.add_argument(
        "folder", metavar="DIR", help="folder of the store, or an address such as s3://bucket/runs/a"
    )
    save.add_argument("file", type=Path, metavar="FILE", help="file or folder to write")
    save.add_argument("--step", type=int, metavar="N", help="training step of the snapshot (the latest)")
    save.add_argument("--fast", type=Path, metavar="DIR", help="the store's fast tier, if it has one")
    save.add_argument("--part", metavar="NAME", help="part of the state, such as model (all of it)")
    save.add_argument("--shard", metavar="SIZE", help="bytes of tensors in each file of a folder (5 GB)")
    save.add_argument("--overwrite", action="store_true", help="write a file anew that is there already")

    text = "write checksums next to a checkpoint that is known to be good"
    seal = _command(commands, "seal", text, _seal, "model.safetensors", _OF_SEAL)
    seal.add_argument("path", type=Path, metavar="PATH", help="a file, or a folder as DCP writes it")
    seal.add_argument("--overwrite", action="store_true", help="seal anew what was sealed before")

    text = "compare a sealed checkpoint with its checksums; exit status 1 if anything differs"
    check = _command(commands, "check", text, _check, "model.safetensors", _OF_CHECK)
    check.add_argument("path", type=Path, metavar="PATH", help="checkpoint that was sealed")


def _command(
    commands: Any, name: str, text: str, run: Any, example: str, more: str = ""
) -> argparse.ArgumentParser:
    parser = add_command(
        commands, name, run, text, epilog=f"Example: penstock snapshots {name} {example}\n{more}"
    )
    add_output_options(parser, plot=False)
    return parser


def check_store(folder: str, fast: Path | None = None) -> None:
    """Check that the folders of a store are there; an address is not looked at.

    Raises: ConfigError if there is no such folder, or it is that of a snapshot or the parent of stores.
    """
    from penstock.checkpoint.files.catalog import describe_mistaken_folder

    for place in (folder, fast):
        if place is None or "://" in str(place):
            continue
        path = Path(place).absolute()
        if not path.is_dir():
            raise ConfigError(f"{place} is no folder: name the one that a training saves its snapshots to")
        if instead := describe_mistaken_folder(path):
            raise ConfigError(f"{place} {instead}")


def open_store(folder: str, fast: Path | None = None, **settings: Any) -> SnapshotStore:
    """Return a store that exists already, and that forgets nothing: what stays is for the training to decide.

    Raises: ConfigError if there is no such folder, or it is that of a snapshot.
    """
    from penstock.checkpoint.store import SnapshotStore
    from penstock.policy.retention import Keep
    from penstock.ranks import alone

    check_store(folder, fast)
    return SnapshotStore(folder, fast=fast, keep=Keep(last=None), ranks=alone, **settings)


def _import(options: argparse.Namespace) -> None:
    from penstock.checkpoint.interop.foreign import read_state
    from penstock.checkpoint.store import SnapshotStore
    from penstock.compiling import without_plain_forms
    from penstock.policy.retention import Keep
    from penstock.ranks import alone

    state = read_state(options.file)
    if options.part is not None:
        state = {options.part: state}
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{options.file} holds a {type(state).__name__}, and a snapshot is a mapping: give --part, the name it gets"
        )
    step = step_in(options.file.name) if options.step is None else options.step
    # What was there before stays: to forget is for the training to decide.
    with (
        without_plain_forms(),
        SnapshotStore(options.folder, keep=Keep(last=None), ranks=alone, report=report_to(options)) as store,
    ):
        try:
            store.save(step, state)
        except ConfigError:
            if all(step != one.step for one in store.list()):
                raise
            raise ConfigError(
                f"there is a snapshot of step {step} in {options.folder} already: give {options.file} another, "
                "as --step N, or delete that one first"
            ) from None
    show(options, {"results": [{"step": step, "file": str(options.file), "store": options.folder}]}, [])


def step_in(name: str) -> int:
    """Return the step in a file's name; 0 if it has none.

    >>> step_in("run2-step-900.pt"), step_in("epoch=3-step=1200.ckpt"), step_in("12000.npz"), step_in("resnet50.pt")
    (900, 1200, 12000, 0)
    """
    for pattern in _STEPS:
        found = pattern.findall(name)
        if len(set(found)) == 1:
            return int(found[0])
    return 0


def _export(options: argparse.Namespace) -> None:
    from penstock.checkpoint.interop.exporting import open_readable
    from penstock.checkpoint.interop.foreign import write_state
    from penstock.checkpoint.opened import open_tier

    check_store(options.folder, options.fast)
    tiers = [open_tier(place) for place in (options.fast, options.folder) if place is not None]
    shard = given(options, "shard", parsed_size)
    with open_readable(tiers, options.step, report=print_report) as (step, state):
        files = write_state(
            options.file, state, part=options.part, shard_bytes=shard, overwrite=options.overwrite
        )
    results = [{"file": str(file), "bytes": file.stat().st_size} for file in files]
    total = sum(file.stat().st_size for file in files)
    text = f"{format_count(len(files), 'file')}, {format_bytes(total)}"
    show(options, {"step": step, "results": results}, [], [f"step {step} is in {options.file}: {text}"])


def _seal(options: argparse.Namespace) -> None:
    from penstock.checkpoint.interop.seal import seal

    sealed = seal(options.path, overwrite=options.overwrite)
    text = f"{format_count(len(sealed.files), 'file')}, {format_bytes(sealed.nbytes)}"
    results = [{"file": each.name, "bytes": each.nbytes} for each in sealed.files]
    data = {"seal": str(sealed.path), "results": results}
    show(options, data, [], [f"{options.path} is sealed by {sealed.path.name}: {text}"])


def _check(options: argparse.Namespace) -> None:
    from penstock.checkpoint.interop.seal import check_seal

    report = check_seal(options.path)
    sealed, faults = report.seal, report.faults
    data = {
        "seal": str(sealed.path),
        "files": len(sealed.files),
        "bytes": sealed.nbytes,
        "results": list(map(asdict, faults)),
    }
    text = f"{format_count(len(sealed.files), 'file')}, {format_bytes(sealed.nbytes)}"
    rows = [(fault.file, fault.wrong, fault.why) for fault in faults]
    tables = [Table("", ("file", "is", "why"), rows)] if rows else []
    show(options, data, tables, [] if rows else [f"{options.path} is as it was sealed: {text}"])
    if faults:
        raise DataError(f"{options.path} is not as it was sealed, in {format_count(len(faults), 'file')}")
