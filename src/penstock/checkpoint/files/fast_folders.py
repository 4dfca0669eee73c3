"""Which folders were the fast tier of a store: what was not drained may lie there, and who reads later may not know.

It is written with the snapshots of the slow tier, in `.fast-tier`: a list, the one that was used last first. One that
was used before stays in it for as long as something is left there that was not drained.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.checkpoint.files.catalog import Catalog, Copy
from penstock.checkpoint.files.manifest import step_of
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import ConfigError, DataError

_FILE = ".fast-tier"
#: Of other hosts, where nobody here can say whether anything is left.
_MOST_FOLDERS = 8


@dataclass(frozen=True, slots=True)
class FastFolder:
    """A folder that was the fast tier.

    path: absolute. host: that wrote to it; another may have another folder there. undrained: uids of what was left when
    another folder took its place; None for the one that was used last, where all that the slow tier lacks may be.
    """

    path: str
    host: str
    undrained: tuple[str, ...] | None = None


def holds_store(path: Path) -> bool:
    """Return whether a store has been in a folder."""
    return any(name == ".lock" or step_of(name) is not None for name in os.listdir(path))


def remembered(slow: LocalTier) -> list[FastFolder]:
    """Return what a slow tier's folder says, the one that was used last first; nothing where it cannot be read."""
    try:
        return [
            FastFolder(
                str(one["path"]),
                str(one["host"]),
                None if one["undrained"] is None else tuple(map(str, one["undrained"])),
            )
            for one in json.loads((slow.path / _FILE).read_bytes())
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def remember(catalog: Catalog) -> list[str]:
    """Write into the folder of a slow tier where the fast one is; by who may write there, once it has looked.

    Returns: what to say of others, where something was left that is not drained.
    Raises: DataError.
    """
    fast, slow = catalog.tiers[0], catalog.tiers[-1]
    if fast is slow or not isinstance(fast, LocalTier) or not isinstance(slow, LocalTier):
        return []
    host = socket.gethostname()
    folders, lines = [FastFolder(str(fast.path.absolute()), host)], []
    before = remembered(slow)
    for one in before:
        if one.path == folders[0].path:
            continue
        if not os.path.isdir(one.path):
            folders += [one] if one.host != host else []
            continue
        left = _left(one, catalog)
        if left:
            folders.append(replace(one, undrained=tuple(copy.link.uid for copy in left)))
            steps = ", ".join(str(copy.step) for copy in left)
            lines.append(
                f"{one.path}, the fast tier of {slow.name} before, holds what was not drained, of step {steps}: "
                f"`penstock snapshots drain {slow.name} --fast {one.path}` copies it"
            )
    folders = folders[:_MOST_FOLDERS]
    if folders != before:
        slow.put(_FILE, json.dumps([asdict(one) for one in folders]).encode() + b"\n")
    return lines


def _left(folder: FastFolder, catalog: Catalog) -> Sequence[Copy]:
    """Return what a folder has and the slow tier of a catalog lacks."""
    seen = _seen(folder)
    drained = {copy.link.uid for copy in catalog.on_tier(len(catalog.tiers) - 1)}
    return [
        copy
        for copy in (seen.on_tier(0) if seen else ())
        if copy.manifest
        and copy.link.uid not in drained
        and (folder.undrained is None or copy.link.uid in folder.undrained)
    ]


def _seen(folder: FastFolder) -> Catalog | None:
    catalog = Catalog([LocalTier(folder.path)])
    try:
        catalog.look()
    except DataError:
        return None
    return catalog


def describe_newer_on_fast(catalog: Catalog) -> str:
    """Return what to say where a fast tier that is not named has newer snapshots than a catalog saw, or ""."""
    slow = catalog.tiers[-1]
    if not isinstance(slow, LocalTier):
        return ""
    named = {str(tier.path.absolute()) for tier in catalog.tiers if isinstance(tier, LocalTier)}
    for folder in remembered(slow):
        # Of another machine, or removed: nobody can say here whether anything is left there.
        if folder.path in named or not os.path.isdir(folder.path):
            continue
        left = _seen(folder)
        if left is not None and left.newest_seconds() > catalog.newest_seconds():
            on_host = "" if folder.host == socket.gethostname() else f" (written on {folder.host})"
            return f"newer snapshots than in {slow.name} lie undrained in {folder.path}{on_host}: name it as fast="
    return ""


def look_and_choose(
    catalog: Catalog, step: int | None, report: Callable[[str], None], *, was_there: bool = False
) -> int:
    """Look, and return the step of a snapshot that is there, as `Catalog.choose` does.

    Raises: ConfigError, naming a fast tier that has newer snapshots, too; DataError.
    """
    catalog.look()
    newer = describe_newer_on_fast(catalog)
    try:
        chosen = catalog.choose(step, was_there=was_there)
    except ConfigError as error:
        if not newer:
            raise
        raise ConfigError(f"{error}; {newer}") from error
    if newer:
        report(newer)
    return chosen
