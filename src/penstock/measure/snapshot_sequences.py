"""Snapshots of one training, in their order, wherever they came from: read a block at a time, never whole.

A folder is a snapshot store, or has a file for each snapshot, .npy (one array), .npz, .safetensors, .pt, .pth, .bin or
.ckpt, or a folder for each with Hugging Face's model.safetensors in it. They are in the order of the numbers in their
names, "run2-step-900.pt" before "run2-step-1000.pt".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from penstock.checkpoint.files.catalog import Catalog, Link, open_links
from penstock.checkpoint.files.manifest import step_of
from penstock.checkpoint.files.reading import Chain, OpenSnapshot
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.interop.foreign import INDEX, NUMPY, SAFETENSORS, SINGLE, TORCH, read_state
from penstock.checkpoint.opened import open_tier
from penstock.checkpoint.state.flatten import Source, flatten
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout
from penstock.checkpoint.state.tree import fits
from penstock.checkpoint.tiers.local import LocalReader, LocalTier
from penstock.checkpoint.tiers.tier import Tier
from penstock.errors import ConfigError, DataError
from penstock.units import format_count, format_names

_ENDINGS = (SAFETENSORS, *TORCH, *NUMPY)


class Snapshots(Protocol):
    """A sequence of snapshots."""

    @property
    def names(self) -> Sequence[str]:
        """Return what each is called, in their order."""
        ...

    def layouts(self, snapshot: int) -> Sequence[Layout]: ...

    def block(self, snapshot: int, layout: Layout, number: int, scratch: Scratch) -> Bytes:
        """Return the bytes of a tensor's block, valid until `scratch` is used again. Called by several threads.

        Raises: FormatError, DataError where it is read and cannot be.
        """
        ...

    def close(self) -> None: ...


def open_snapshots(folder: str | Path, fast: str | Path | None = None) -> Snapshots:
    """Open the snapshots in a folder, or those of a store at an address such as s3://bucket/runs/a.

    fast: a store's fast tier, if it has one.
    Raises: ConfigError if there are fewer than two, or to read one is to run code; FormatError, DataError where one
        cannot be read.
    """
    places = [str(place).removeprefix("file://") for place in (fast, folder) if place is not None]
    for place in places:
        if "://" not in place and not Path(place).is_dir():
            raise ConfigError(
                f"{place} is no folder: name one with a file for each snapshot, or a snapshot store"
            )
    tiers = [open_tier(place) if "://" in place else _Unheld(place) for place in places]
    if any(step_of(name) is not None for tier in tiers for name in tier.folders()):
        return StoredSnapshots(tiers)
    if fast is not None or "://" in places[-1]:
        raise ConfigError(
            f"there is no snapshot in {' and '.join(places)}; other people's files are studied in a folder"
        )
    inside = list(Path(places[-1]).iterdir())
    found = [path for path in inside if path.suffix.lower() in _ENDINGS and path.is_file()]
    if not found:
        found = [path for path in inside if (path / SINGLE).exists() or (path / INDEX).exists()]
    if len(found) < 2:
        raise ConfigError(
            f"{folder} is no snapshot store, and has {format_count(len(found), 'file')} ending in "
            f"{', '.join(_ENDINGS)}, or folders with {SINGLE}: a study needs at least two snapshots"
        )
    return SnapshotFiles(sorted(found, key=_place))


def _place(path: Path) -> tuple[tuple[int, ...], str]:
    return tuple(int(digits) for digits in re.findall(r"\d+", path.stem)), path.name


def common_layouts(
    snapshots: Snapshots, only: Iterable[str] | None = None
) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """Return the tensors to compare, and the names of those that are not alike in all snapshots.

    only: patterns of names, see `penstock.checkpoint.state.tree.select`; None: all floats.
    Raises: ConfigError if none are left.
    """
    patterns = None if only is None else tuple(only)

    def is_wanted(layout: Layout) -> bool:
        if patterns is None:
            return layout.dtype.is_float
        # A "/" within a key is "~1" in a name; whoever wrote the key writes a "/".
        plain = layout.name.replace("~1", "/").replace("~0", "~")
        return any(fits(layout.name, pattern) or fits(plain, pattern) for pattern in patterns)

    every = [snapshots.layouts(snapshot) for snapshot in range(len(snapshots.names))]
    wanted = [layout for layout in every[0] if is_wanted(layout) and layout.nbytes]
    others = [frozenset(layouts) for layouts in every[1:]]
    common = tuple(layout for layout in wanted if all(layout in other for other in others))
    kept = {layout.name for layout in common}
    names = dict.fromkeys(
        layout.name for layouts in every for layout in layouts if is_wanted(layout) and layout.nbytes
    )
    left_out = tuple(name for name in names if name not in kept)
    if not common:
        what = "floating-point tensors" if patterns is None else f"tensors that fit {' or '.join(patterns)}"
        raise ConfigError(
            f"no {what} are alike in all {len(every)} snapshots; the first one has "
            f"{format_names((layout.name for layout in every[0]), 5)}"
        )
    return common, left_out


class _Unheld(LocalTier):
    """A store's folder of which no file stays open: there may be hundreds of snapshots, each of many parts."""

    def open(self, folder: str, file: str) -> _UnheldReader:  # type: ignore[override]
        """Return a file's reader, which opens it anew for each read. Raises: FileNotFoundError, DataError."""
        return _UnheldReader(self.path / folder / file)


class _UnheldReader:
    """A file that is open only while it is read."""

    reads_at_once = LocalReader.reads_at_once

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(LocalReader(path)) as reader:
            self.nbytes = reader.nbytes

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill `out` from `offset` on. Raises: DataError naming the file."""
        try:
            with closing(LocalReader(self._path)) as reader:
                reader.read_into(offset, out)
        except FileNotFoundError:
            raise DataError(f"{self._path} was removed while it was read; does a training run?") from None

    def close(self) -> None:
        """Do nothing: it is not open."""


class StoredSnapshots:
    """The snapshots of a store, made back block by block."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Open all snapshots of a store. tiers: the nearest first; their files need not stay open.

        Raises: ConfigError if there are fewer than two; FormatError, DataError.
        """
        catalog = Catalog(tiers)
        catalog.look()
        steps = sorted(catalog.steps())
        if len(steps) < 2:
            raise ConfigError(
                f"{tiers[-1].name} holds {format_count(len(steps), 'snapshot')}, and a study needs two: keep more, "
                "with Keep(last=...)"
            )
        self.names = [str(step) for step in steps]
        #: Each once, whatever the number of differences to it.
        self._opened: dict[Link, OpenSnapshot] = {}
        self._chains: list[Chain] = []
        try:
            for step in steps:
                links = catalog.chains(step)[0]
                for link in links:
                    if link not in self._opened:
                        (self._opened[link],) = open_links(catalog, [link]).links
                self._chains.append(Chain([self._opened[link] for link in links]))
        except BaseException:
            self.close()
            raise

    def layouts(self, snapshot: int) -> Sequence[Layout]:
        return [stored.layout for stored in self._chains[snapshot].manifest.tensors]

    def block(self, snapshot: int, layout: Layout, number: int, scratch: Scratch) -> Bytes:
        block = self._chains[snapshot].block(layout, number, scratch)
        assert block is not None, "only tensors are asked for that every snapshot has"
        return block

    def close(self) -> None:
        for snapshot in self._opened.values():
            snapshot.close()


class SnapshotFiles:
    """A file for each snapshot, mapped into memory rather than read."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Open files, in their order. Raises: ConfigError, DataError naming one that cannot be read."""
        self.names = [path.stem for path in files]
        self._sources: list[Mapping[Layout, Source]] = [_sources(path) for path in files]

    def layouts(self, snapshot: int) -> Sequence[Layout]:
        return list(self._sources[snapshot])

    def block(self, snapshot: int, layout: Layout, number: int, scratch: Scratch) -> Bytes:
        source = self._sources[snapshot][layout]
        data = source.view()
        if data is None:  # its numbers do not lie side by side
            data = scratch.buffer(0, layout.nbytes)
            source.copy_into(data)
        step = BLOCK_VALUES * layout.dtype.item_bytes
        return data[number * step : (number + 1) * step]

    def close(self) -> None:
        self._sources = []


def _sources(path: Path) -> dict[Layout, Source]:
    if path.suffix.lower() == ".npy":
        (array,) = read_state(path, framework="numpy").values()
        state = {"values": array}  # not by the name of its file, which is another in each snapshot
    else:
        state = read_state(path)
    return {source.layout: source for source in flatten(state).sources}
