"""torch.distributed.checkpoint over a snapshot store: FSDP and DTensor states as deltas, resharded when they are read.

    writer = StoreWriter("runs/a")
    dcp.save(state, checkpoint_id="1200", storage_writer=writer)       # or dcp.async_save
    dcp.load(state, checkpoint_id="1200", storage_reader=StoreReader("runs/a"))

What is written is a snapshot as any other: `SnapshotStore("runs/a").restore()` puts it together on one process, and
`StoreReader` reads what `SnapshotStore.save` wrote. Numbers, text and lists of them are kept as such; other objects,
which DCP would pickle, are refused by name.
"""

from __future__ import annotations

import io
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.catalog import Catalog, open_way
from penstock.checkpoint.codecs import DEFAULT, codec_named
from penstock.checkpoint.dtypes import dtype_named
from penstock.checkpoint.loading import plan_loading
from penstock.checkpoint.manifest import Stored, folder_of, read_layout, write_layout, write_manifest
from penstock.checkpoint.parts import Part
from penstock.checkpoint.ranks import ranks_of_this_job
from penstock.checkpoint.reading import Chain, Wanted, parts_by_name, read_wanted, whole_layout
from penstock.checkpoint.recipe import (
    RAW,
    Plan,
    Way,
    check_part,
    decide,
    made_coder,
    manifest_of,
    new_plan,
    write_part,
)
from penstock.checkpoint.saving import Saved
from penstock.checkpoint.staging import StagingArea, room_of, waves_of
from penstock.checkpoint.state import Source, flatten
from penstock.checkpoint.store import open_tier, tell
from penstock.checkpoint.tensors import Box, Bytes, Layout, Tensor
from penstock.checkpoint.tier import Draft
from penstock.checkpoint.tree import (
    ArrayLeaf,
    MappingNode,
    Node,
    SequenceNode,
    decode_key,
    joined,
    key_names,
    read_tree,
)
from penstock.checkpoint.upkeep import Upkeep
from penstock.checkpoint.writing import InMemory, Piece, References
from penstock.errors import ConfigError
from penstock.flow.cpus import available_cpus
from penstock.flow.ordered import Workers
from penstock.policy.keeping import Keep
from penstock.policy.retention import Scheme
from penstock.policy.snap_distance import SnapDistance

_Path = tuple[str | int, ...]


class StoreWriter(StorageWriter):
    """Writes DCP checkpoints as snapshots of a store. One for a training; it is used again for every save.

    Collectives are DCP's own: each rank writes its part, and the coordinator makes them a snapshot in `finish`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: Keep = Keep(),  # noqa: B008, it is frozen
        scheme: Scheme = "progressive",
        snap_dis: SnapDistance = 10,
        codec: str = DEFAULT,
        reference: Literal["memory", "stored"] = "memory",
        storage_options: Mapping[str, Any] | None = None,
        report: Callable[[str], None] | None = tell,
    ) -> None:
        """Arguments as of `penstock.checkpoint.store.SnapshotStore`. Raises: ConfigError naming the argument."""
        codec_named(codec)
        self._way = Way(scheme, snap_dis, codec)
        self._tier = open_tier(folder, storage_options)
        self._catalog = Catalog([self._tier])
        self._upkeep = Upkeep(self._catalog, keep, None)
        self._holds_reference = reference == "memory" and scheme != "complete" and codec != RAW
        self._report = report
        self._areas = [StagingArea(), StagingArea()]
        #: The last snapshot as this rank wrote it: its uid, and its tensors in the second area.
        self._held: tuple[str, list[Piece]] | None = None
        self._step: int | None = None
        self._plan: Plan | None = None
        self._draft: Draft | None = None
        self._begin_seconds = 0.0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save. checkpoint_id: the step, such as "1200" or "step-1200"."""
        self._begin_seconds = time.monotonic()
        self._step = None if checkpoint_id is None else step_named(checkpoint_id)
        self._abort()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide what the snapshot shall be, and begin it.

        Raises: ConfigError if no step was given, or there is a snapshot of it; DataError.
        """
        if self._step is None:
            raise ConfigError(
                'the step is not known: give it as checkpoint_id, such as dcp.save(..., checkpoint_id="1200")'
            )
        if not all(plan.usable for plan in plans):
            raise ConfigError(
                "a planner with enable_plan_caching leaves out what a snapshot is made of: turn it off"
            )
        self._upkeep.open_for_writing()
        paths = _paths_of(plans)
        layouts = [
            _layout(item, paths)
            for plan in plans
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO
        ]
        self._plan = decide(self._catalog, 0, new_plan(self._step, self._catalog), self._way, layouts)
        self._upkeep.hold(step for _, step in self._plan.chain)
        self._draft = self._tier.begin(folder_of(self._step), self._plan.uid)
        written = self._plan.write()
        # A rank without tensors writes no part, and parts are numbered through.
        has_part = [any(item.type != WriteItemType.BYTE_IO for item in plan.items) for plan in plans]
        return [
            replace(plan, storage_data=[written, sum(has_part[:rank]) if has_part[rank] else None])
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; done when it returns. Raises: ConfigError naming what is not kept; DataError."""
        written, number = plan.storage_data
        snapshot = Plan.read(written)
        paths = _paths_of([plan])
        results = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                node = _plain(item, planner, paths)
                results.append(WriteResult(item.index, 0, ["plain", _path(item.index.fqn, paths), node]))
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        if number is not None:
            part, stored = self._write_part(snapshot, number, tensors, planner, paths)
            for item, one in zip(tensors, stored, strict=True):
                said = [*write_layout(one.layout), one.first_block]
                row = [
                    "tensor",
                    _path(item.index.fqn, paths),
                    number,
                    said,
                    [part.file, part.nbytes, part.table],
                ]
                results.append(WriteResult(item.index, one.layout.nbytes, row))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_part(
        self, snapshot: Plan, number: int, items: Sequence[WriteItem], planner: SavePlanner, paths: _Paths
    ) -> tuple[Part, list[Stored]]:
        sources = []
        for item in items:
            value = planner.resolve_data(item)
            assert isinstance(value, torch.Tensor), "an item that is no BYTE_IO is a tensor"
            (source,) = flatten({"tensor": value.detach().contiguous()}).sources
            layout = _layout(item, paths)
            sources.append(Source(layout, source.array, source.address, source.is_on_host))
        (cuts,) = waves_of(sources, None)
        area = self._areas[0]
        area.reserve(room_of(cuts))
        pieces = area.copy(cuts)
        draft = self._draft or self._tier.begin(folder_of(snapshot.step), snapshot.uid, join=True)
        with Workers(min(4, available_cpus()), f"penstock-encode-{snapshot.step}") as workers:
            references, chain = self._references(snapshot)
            try:
                coder = made_coder(
                    self._way.codec,
                    lambda: (Tensor(piece.layout, piece.data) for piece in pieces),
                    references,
                )
                made = write_part(draft, snapshot, number, [pieces], references, coder, workers)
            finally:
                if chain is not None:
                    chain.close()
        if self._holds_reference:
            self._held = snapshot.uid, pieces
            self._areas.reverse()
        return made.part, list(made.stored)

    def _references(self, snapshot: Plan) -> tuple[References | None, Chain | None]:
        if snapshot.reference is None:
            return None, None
        if self._held is not None and self._held[0] == snapshot.reference.uid:
            return InMemory(self._held[1]), None
        chain = open_way(self._catalog, snapshot.chain)
        return chain, chain

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the parts a snapshot, then remove what nobody wants any more. Raises: DataError, FormatError."""
        plan, draft = self._plan, self._draft
        assert plan is not None, "prepare_global_plan decided"
        assert draft is not None, "prepare_global_plan began it"
        parts: dict[int, Part] = {}
        tensors: dict[int, list[Stored]] = {}
        leaves: dict[_Path, Any] = {}
        for result in (result for rank in results for result in rank):
            kind, path, *said = result.storage_data
            if kind == "plain":
                leaves[tuple(path)] = said[0]
            else:
                number, (*layout, first), part = said
                parts[number] = Part(*part)
                stored = Stored(read_layout(layout), number, first)
                tensors.setdefault(number, []).append(stored)
                leaves[tuple(path)] = {"array": {"of": stored.layout.name, "kind": "torch"}}
        tree = _tree(leaves)
        manifest = manifest_of(
            plan, self._way, tree, (), ((parts[number], tensors[number]) for number in sorted(parts))
        )
        read_tree(tree, [whole_layout(those) for those in parts_by_name(manifest).values()])
        draft.commit(write_manifest(manifest))
        self._draft = None
        self._catalog.add(0, manifest)
        self._upkeep.let_go(step for _, step in plan.chain)
        seconds = time.monotonic() - self._begin_seconds
        for number, part in enumerate(manifest.parts):
            check_part(self._tier, plan, number, part, to_its_end=False)
        self._upkeep.forget(time.time())
        if self._report is not None:
            reference = plan.reference.step if plan.reference else None
            raw_bytes, stored_bytes = manifest.raw_bytes, manifest.stored_bytes
            saved = Saved(
                plan.step, plan.uid, reference, raw_bytes, stored_bytes, seconds, seconds, self._tier.name
            )
            self._report(saved.told("durable"))

    def _abort(self) -> None:
        if self._draft is not None and self._plan is not None:
            self._draft.abort()
            self._upkeep.let_go(step for _, step in self._plan.chain)
        self._draft = self._plan = None

    def close(self) -> None:
        """Let go of the folder and of the memory; twice is harmless."""
        self._abort()
        self._held = None
        self._upkeep.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return _digits(checkpoint_id) is not None


class StoreReader(StorageReader):
    """Reads snapshots of a store for `dcp.load`, whoever wrote them, on any number of ranks."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """folder, storage_options: as of `penstock.checkpoint.store.SnapshotStore`."""
        self._catalog = Catalog([open_tier(folder, storage_options)])
        self._step: int | None = None
        self._way: Sequence[tuple[int, int]] = ()
        #: Of each tensor of the metadata, by its fqn: its name in the snapshot; and of each plain value: the same, and
        #: where it is.
        self._names: dict[str, str] = {}
        self._plain: dict[str, tuple[str, _Path]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load. checkpoint_id: the step; None: the snapshot that was saved last."""
        self._step = None if checkpoint_id is None else step_named(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what there is. Raises: ConfigError if there is no such snapshot; FormatError, DataError."""

        def look() -> list[tuple[int, int]]:
            self._catalog.look()
            steps = self._catalog.steps()
            step = steps[-1] if self._step is None and steps else self._step or 0
            return self._catalog.ways(step)[0]

        # Rank 0 alone looks: a network file system may show others what was there a while ago.
        is_joint = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        self._way = ranks_of_this_job().ask_first("the choice of a snapshot", look) if is_joint else look()
        with closing(open_way(self._catalog, self._way)) as chain:
            return self._metadata(chain)

    def _metadata(self, chain: Chain) -> Metadata:
        parts = parts_by_name(chain.manifest)
        tree = read_tree(chain.manifest.tree, [whole_layout(those) for those in parts.values()])
        described: dict[str, Any] = {}
        paths: dict[str, _Path] = {}
        self._names, self._plain = {}, {}
        for leaf, path in _leaves(tree.root):
            fqn = ".".join(map(str, path))
            paths[fqn] = path
            if not isinstance(leaf, ArrayLeaf):
                self._plain[fqn] = leaf.name, path
                described[fqn] = BytesStorageMetadata()
                continue
            if not leaf.is_whole or leaf.kind != "torch":
                raise ConfigError(
                    f"{leaf.name} is a view or an array of {leaf.kind}, which DCP does not load: restore the "
                    "snapshot with SnapshotStore"
                )
            self._names[fqn] = leaf.of
            stored = parts[leaf.of]
            whole = whole_layout(stored)
            chunks = [
                ChunkStorageMetadata(
                    torch.Size(one.layout.box.offsets if one.layout.box else (0,) * len(whole.shape)),
                    torch.Size(one.layout.shape),
                )
                for one in stored
            ]
            properties = TensorProperties(dtype=getattr(torch, whole.dtype.name))
            described[fqn] = TensorStorageMetadata(properties, torch.Size(whole.shape), chunks)
        return Metadata(described, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a rank needs; done when it returns. Raises: FormatError naming file and tensor; DataError."""
        with closing(open_way(self._catalog, self._way)) as chain:
            self._read_plain(chain, plan, planner)
            self._read_tensors(chain, plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_plain(self, chain: Chain, plan: LoadPlan, planner: LoadPlanner) -> None:
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if not items:
            return
        layouts = [whole_layout(those) for those in parts_by_name(chain.manifest).values()]
        tree = read_tree(chain.manifest.tree, layouts)
        names = [self._plain[item.storage_index.fqn][0] for item in items]
        state = plan_loading(tree, only=names).state()
        for item in items:
            value = state
            for part in self._plain[item.storage_index.fqn][1]:
                value = value[part]
            # DCP unpickles what it is given: made here, of values that were read as our own JSON.
            pickled = io.BytesIO()
            torch.save(value, pickled)
            pickled.seek(0)
            planner.load_bytes(item, pickled)

    def _read_tensors(self, chain: Chain, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_place = {
            (stored.layout.name, stored.layout.box.offsets if stored.layout.box else None): stored
            for stored in chain.manifest.tensors
        }
        #: The items of what is being read.
        items: dict[Wanted, ReadItem] = {}

        def wanted() -> Iterator[Wanted]:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    continue
                name = self._names[item.storage_index.fqn]
                stored = by_place.get((name, None)) or by_place[name, tuple(item.storage_index.offset or ())]
                layout = _part_of(stored.layout, item)
                one = Wanted(layout, [stored], np.empty(layout.nbytes, np.uint8))
                items[one] = item
                yield one

        with Workers(min(4, available_cpus()), f"penstock-decode-{chain.manifest.step}") as workers:
            for one in read_wanted(chain, wanted(), workers):
                item = items.pop(one)
                target = planner.resolve_tensor(item).detach()
                target.copy_(_as_torch(one.layout, one.out))
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return _digits(checkpoint_id) is not None


def step_named(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the step of a checkpoint id. Raises: ConfigError if it ends in no number."""
    step = _digits(checkpoint_id)
    if step is None:
        raise ConfigError(
            f'checkpoint_id is {os.fspath(checkpoint_id)!r}; it must be the step, such as "1200" or "step-1200"'
        )
    return step


def _digits(checkpoint_id: str | os.PathLike[str]) -> int | None:
    text = os.fspath(checkpoint_id).rstrip("/")
    digits = text[len(text.rstrip("0123456789")) :]
    return int(digits) if digits and digits.isascii() else None


# -- Names and paths -------------------------------------------------------------------------------------------

_Paths = Mapping[str, _Path]


def _paths_of(plans: Iterable[SavePlan]) -> _Paths:
    """Return where in the nested state each fqn is; what is not said is at the top."""
    paths: dict[str, _Path] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            paths |= plan.planner_data
    return paths


def _path(fqn: str, paths: _Paths) -> _Path:
    return tuple(paths.get(fqn, (fqn,)))


def _name(path: _Path) -> str:
    name = ""
    for place, part in enumerate(path):
        (own,) = key_names([part])
        name = joined(name, own, is_top=place == 0)
    return name


def _layout(item: WriteItem, paths: _Paths) -> Layout:
    data = item.tensor_data
    assert data is not None, "a tensor's item says what it is"
    shape, whole, offsets = tuple(data.chunk.sizes), tuple(data.size), tuple(data.chunk.offsets)
    dtype = dtype_named(str(data.properties.dtype).removeprefix("torch."))
    box = None if shape == whole else Box(whole, offsets)
    return Layout(_name(_path(item.index.fqn, paths)), dtype, shape, box)


def _plain(item: WriteItem, planner: SavePlanner, paths: _Paths) -> Any:
    """Return a value that is no tensor as a tree's node. Raises: ConfigError naming one that is not kept."""
    if not isinstance(planner, DefaultSavePlanner):
        raise ConfigError(
            f"{item.index.fqn} is bytes of a planner of your own ({type(planner).__name__}), which nobody can check: "
            "leave it out, or derive the planner from DefaultSavePlanner"
        )
    value = planner.lookup_object(item.index)
    name = _name(_path(item.index.fqn, paths))
    try:
        flat = flatten({"value": value})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if flat.sources:
        raise ConfigError(
            f"{name} is a {type(value).__name__} with arrays in it: save these as tensors of their own"
        )
    tree: Any = flat.tree
    return tree["map"]["value"]


def _tree(leaves: Mapping[_Path, Any]) -> Any:
    """Return the tree with a node at each path; a mapping whose keys are 0, 1, ... is a list."""
    if () in leaves:
        return leaves[()]
    inner: dict[str | int, dict[_Path, Any]] = {}
    for path, node in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = node
    nodes = {key: _tree(parts) for key, parts in inner.items()}
    if nodes and all(isinstance(key, int) for key in nodes) and set(nodes) == set(range(len(nodes))):
        return [nodes[index] for index in range(len(nodes))]
    if all(isinstance(key, str) for key in nodes):
        return {"map": nodes}
    return {"items": [[key, node] for key, node in nodes.items()]}


def _leaves(node: Node, path: _Path = ()) -> Iterator[tuple[Node, _Path]]:
    """Yield the values of a tree, and where each is in the nested state.

    A mapping or list without arrays is yielded too, beside what is in it: DCP takes one as a single value.
    """
    if isinstance(node, (MappingNode, SequenceNode)):
        keys = (
            [decode_key(key, torch) for key in node.keys]
            if isinstance(node, MappingNode)
            else range(len(node.parts))
        )
        below = [
            found for key, part in zip(keys, node.parts, strict=True) for found in _leaves(part, (*path, key))
        ]
        if path and not any(isinstance(leaf, ArrayLeaf) for leaf, _ in below):
            yield node, path
        yield from below
    else:
        yield node, path


def _part_of(layout: Layout, item: ReadItem) -> Layout:
    """Return what an item wants of a stored part."""
    shape = tuple(item.lengths)
    if shape == layout.shape:
        return layout
    whole, offsets = layout.shape, tuple(item.storage_offsets)
    if layout.box is not None:
        whole = layout.box.whole
        offsets = tuple(map(operator.add, layout.box.offsets, offsets))
    return Layout(layout.name, layout.dtype, shape, Box(whole, offsets))


def _as_torch(layout: Layout, data: Bytes) -> torch.Tensor:
    tensor = torch.from_numpy(data).view(getattr(torch, layout.dtype.name))
    return tensor.reshape(layout.shape)
