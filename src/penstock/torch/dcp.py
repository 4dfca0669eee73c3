"""torch.distributed.checkpoint over a snapshot store: FSDP and DTensor states as deltas, resharded when they are read.

    writer = StoreWriter("runs/a")
    dcp.save(state, checkpoint_id="1200", storage_writer=writer)       # or dcp.async_save
    dcp.load(state, checkpoint_id="1200", storage_reader=StoreReader("runs/a"))

What is written is a snapshot as any other: `SnapshotStore("runs/a").restore()` puts it together on one process, and
`StoreReader` reads what `SnapshotStore.save` wrote. Numbers, text and lists of them are kept as such; other objects,
which DCP would pickle, are refused by name.

DCP's collectives wait for as long as the process group does, and name nobody. So all ranks meet here before DCP begins:
one that does not come is named within a minute.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
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

from penstock.checkpoint.arguments import checked_step, checked_trace, made_ranks
from penstock.checkpoint.config import StoreArguments, StoreConfig, store_config
from penstock.checkpoint.due import DueSaves
from penstock.checkpoint.files.catalog import Catalog, Link, looking_again
from penstock.checkpoint.files.reading import Chain, Wanted, parts_by_name, read_wanted, tree_of
from penstock.checkpoint.opened import OpenedStore, open_tiers, quiet
from penstock.checkpoint.recipe import SnapshotDecision
from penstock.checkpoint.restoring import Restorer
from penstock.checkpoint.staged import CopiedInTurn
from penstock.checkpoint.state.dtypes import dtype_named
from penstock.checkpoint.state.flatten import Shard, Source, flatten, holds_arrays, memory_at
from penstock.checkpoint.state.sharding import check_whole
from penstock.checkpoint.state.staging import waves_of
from penstock.checkpoint.state.tensors import Box, Bytes, Layout
from penstock.checkpoint.state.tree import (
    QUANTIZED,
    ArrayLeaf,
    MappingNode,
    Node,
    SequenceNode,
    decode_key,
    decode_plain,
    describe_type,
    joined,
    key_names,
    read_tree,
    write_mapping,
)
from penstock.checkpoint.writer import Blocked, Content, Job, OwnPart
from penstock.closing import Closeable
from penstock.errors import ConfigError, DataError, FormatError, RankError
from penstock.flow.ordered import Workers
from penstock.flow.recorder import Recorder
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.policy.saving import Begin, Save, SaveTerms
from penstock.ranks import Ranks, alone, ranks_of_this_job
from penstock.report import checked_report, print_report
from penstock.trace.schema import Kind

_Path = tuple[str | int, ...]
#: Of what is staged at a time where nothing is kept for the next difference.
_WAVE_BYTES = 32 << 20
#: That a plain value takes in a manifest, where it is not known yet.
_PLAIN_BYTES = 64
#: A list of which more is missing than is there is no list.
_MOST_GAPS = 16


class StoreWriter(Closeable, StorageWriter):
    """Writes DCP checkpoints as snapshots of a store. One for a training; it is used again for every save.

    Collectives are DCP's own: each rank writes its part, and the coordinator makes them a snapshot in `finish`. What
    fails on one rank DCP raises on all; what was written is removed when the next save begins, or by `close`.

    Memory of a rank: what it writes, once, which stays for the next delta; with reference="stored", or a fast tier, a
    few tens of MiB.

    Pickled, it is the same writer wherever it is unpickled in a process: so that of `async_save` in a process of its
    own continues with deltas. From then on only that process writes.
    """

    def __init__(
        self,
        folder: StoreConfig | str | os.PathLike[str],
        *,
        ranks: Callable[[], Ranks] = ranks_of_this_job,
        trace: str | os.PathLike[str] | Recorder | None = None,
        report: Callable[[str], None] | None = print_report,
        **arguments: Unpack[StoreArguments],
    ) -> None:
        """Open a store.

        folder, arguments: those of `penstock.checkpoint.StoreConfig`; or such a configuration alone.
            staging_bytes: memory for the copy of what this rank writes, at most; None: 32 MiB.
        ranks: those that save together, all of the job; `alone` where only some do (process_group=, no_dist=True):
            then nobody is waited for before DCP begins.
        trace, report: as of `penstock.checkpoint.SnapshotStore`. `async_save` blocks no training: of its saves only
            what is written and drained is recorded; in a process of its own, by that process, and in a file: where
            this one has written there before, in another next to it, with "-async" before its ending.

        Raises: ConfigError naming the argument; DataError if the trace cannot be written.
        """
        config = store_config(folder, arguments)
        self._arguments = {"folder": config, "ranks": ranks, "trace": checked_trace(trace), "report": report}
        self._identity = secrets.token_hex(16)
        settings = config.settings
        if settings.encoding.kept_mantissa_bits is not None:
            raise ConfigError("kept_mantissa_bits is of a SnapshotStore: what DCP saves is stored as it is")
        if settings.host_copies is not None:
            raise ConfigError("host_copies is of a SnapshotStore: leave it out for what DCP saves")
        timing = settings.schedule
        self._report = quiet(checked_report(report))
        #: They meet in here, not in DCP; made at once, for all ranks have to make theirs in the same order.
        self._ranks = made_ranks(ranks)
        self._due = DueSaves(timing, lambda: made_ranks(ranks))
        # One rank reports what is found when the folder is opened.
        telling = self._report if self._ranks.rank == 0 else quiet(None)
        self._opened = OpenedStore(
            settings, alone(), telling, SnapshotSpans(trace, self._ranks.rank, telling)
        )
        self._staging_bytes = None if settings.holds_reference else settings.staging_bytes or _WAVE_BYTES
        self._threads = settings.threads
        self._step: int | None = None
        #: On the coordinator, from when the snapshot has begun until it is committed or given up.
        self._job: Job | None = None
        #: What the last save failed with on this rank: the kind of error, and the message.
        self._failed: tuple[str, str] | None = None
        self._begin_seconds = 0.0
        self._part_bytes = 0
        #: The training's: what it does not call does not block it. None: the training is another process.
        self._thread: int | None = threading.get_ident()
        _writers[self._identity] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is pickled: by what it was made of. Raises: ConfigError if it records for a loader."""
        trace: Any = self._arguments["trace"]
        if isinstance(trace, Recorder):
            raise ConfigError(
                "trace is the recorder of a loader, which another process cannot record into: give the path of a file"
            )
        if trace is not None and self._opened.spans.has_file:  # which stays
            trace = Path(trace).with_stem(f"{Path(trace).stem}-async")
        return _writer_of, (self._identity, {**self._arguments, "trace": trace})

    def is_due(self, step: int) -> bool:
        """Return whether to save now, as the schedule says; on all ranks alike.

        step: how many steps the training has done. Raises: ConfigError without a schedule; WaitTimeout, RankError.
        """
        _, is_due = self._due.ask(checked_step(step))
        if is_due:
            # `async_save` in a process of its own does not let this one know of the save.
            self._due.go_on()
        return is_due

    def drain(self) -> None:
        """Return once all that is to be is on the slow tier; all ranks call it, and no save is under way.

        Raises: ConfigError if there is no fast tier; what a drain failed with.
        """
        self._ranks.on_rank_zero("the drain", self._opened.drain)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, on all ranks.

        checkpoint_id: the step, as a number or as the end of a text such as "step-1200".
        Raises: ConfigError if it is none; what a drain failed with; WaitTimeout on all ranks, naming those that do not
            come.
        """
        self._begin_seconds = time.monotonic()

        def ready() -> list[Any]:
            self._opened.raise_of_drain()
            return [_step_of(checkpoint_id), self._failed]

        failed = self._failed
        try:
            of_ranks = self._ranks.gather_then_decide("the beginning of a save", ready)
            failed = next((each for _, each in of_ranks if each), None)
        finally:
            self._failed = None
            self._give_up(failed)
        steps = [step for step, _ in of_ranks]
        if len(set(steps)) > 1:
            raise ConfigError(f"the ranks save different steps: {', '.join(map(str, steps))}")
        self._step = steps[0]

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`. Raises: ConfigError if the ranks are to save each for itself."""
        if self._ranks.size > 1 and not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives is False; the ranks that write one snapshot have to agree on it"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `StorageWriter`."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide what the snapshot shall be, and begin it.

        Raises: ConfigError if no step was given, there is a snapshot of it, or there is no space for the first one of
            the store; DataError.
        """
        self._give_up(None)
        step = self._step
        if step is None:
            raise ConfigError(
                'the step is not known: give it as checkpoint_id, such as dcp.save(..., checkpoint_id="1200")'
            )
        if not all(plan.usable for plan in plans):
            raise ConfigError(
                "a planner with enable_plan_caching leaves out what a snapshot is made of: turn it off"
            )
        paths = _paths_of(plans)
        tensors = [[item for item in plan.items if item.type != WriteItemType.BYTE_IO] for plan in plans]
        layouts = [_layout(item, paths) for items in tensors for item in items]
        check_whole(layout for layout in layouts if layout.box is not None)
        tree = _planned_tree(plans, paths)
        self._opened.check_first(step, tree, layouts, self._due.least_seconds)
        # A rank without tensors writes no part, and parts are numbered through.
        has_part = [bool(items) for items in tensors]
        writer = self._opened.writer
        terms = writer.terms(can_repeat=len(plans) == 1, ranks=max(1, sum(has_part)))
        job = self._job = self._new_job(step, layouts, tree, Save(terms))
        writer.begin(job)
        written = [job.decision, *job.target]
        return [
            replace(plan, storage_data=[written, sum(has_part[:rank]) if has_part[rank] else None])
            for rank, plan in enumerate(plans)
        ]

    def _new_job(self, step: int, layouts: Sequence[Layout], tree: Any, life: Save) -> Job:
        area = self._opened.writer.free_areas()[0]
        content = Content(layouts, tree, rank_trees=())
        own = OwnPart(CopiedInTurn([[]], area), area)
        job = Job(step, content, own, life, Blocked(self._begin_seconds), parts={})
        job.blocked.is_copied.set()
        return job

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; done when it returns. Raises: ConfigError naming what is not kept; DataError."""
        written, number = plan.storage_data
        paths = _paths_of([plan])
        results = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                node = _plain(item, planner, paths)
                results.append(WriteResult(item.index, 0, ["plain", _path(item.index.fqn, paths), node]))
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._part_bytes = 0
        if number is not None:
            sources = [_source(item, planner, paths) for item in tensors]
            self._part_bytes = sum(source.layout.nbytes for source in sources)
            #: With the first of them.
            part = self._write_part(written, number, sources)
            for item, source in zip(tensors, sources, strict=True):
                row = ["tensor", _path(item.index.fqn, paths), source.layout.name, number, part]
                results.append(WriteResult(item.index, source.layout.nbytes, row))
                part = None
        self._go_on(SnapshotDecision(*written[0]).step)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_part(self, written: Any, number: int, sources: Sequence[Source]) -> Any:
        job = self._job
        if job is None:
            decided, *target = written
            decision = SnapshotDecision.read(decided)
            job = self._new_job(decision.step, (), None, Save(SaveTerms()))
            self._opened.writer.join(job, decision, Begin(*target))
        job.own.number = number
        # Training stands still for as long as this takes, so that nothing has to be staged but for the next delta.
        job.own.waves = CopiedInTurn(waves_of(sources, self._staging_bytes), job.own.area)
        workers = Workers(self._threads, f"penstock-encode-{job.step}")
        try:
            return self._opened.writer.write_part(job, workers)
        except BaseException as error:
            self._remember(error)
            raise
        finally:
            if job is not self._job:
                workers.close()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the parts a snapshot, then prune what retention gives up. Raises: DataError, FormatError."""
        job = self._job
        assert job is not None, "prepare_global_plan began it"
        parts: dict[int, Any] = {}
        leaves: dict[_Path, Any] = {}
        for result in (result for rank in results for result in rank):
            kind, path, *said = result.storage_data
            if kind == "plain":
                leaves[tuple(path)] = said[0]
            else:
                name, number, part = said
                leaves[tuple(path)] = _array(name)
                if part is not None:
                    parts[number] = part
        tree = _tree(leaves)
        read_tree(tree, {layout.name: layout.whole for layout in job.content.layouts}.values())
        self._step = None
        saved = self._opened.writer.commit(job, tree, parts)
        self._job = None
        self._go_on(job.step)
        self._report(saved.line("durable") + saved.note)
        if self._opened.drainer is not None:
            self._opened.drainer.go_on()

    def _go_on(self, step: int) -> None:
        seconds = time.monotonic() - self._begin_seconds
        if self._job is None and self._thread == threading.get_ident():
            self._opened.spans.record(Kind.SAVE, step, seconds, self._part_bytes)
        self._due.go_on()
        self._due.took(seconds, seconds)

    def _remember(self, error: BaseException) -> None:
        """Keep the error of this rank; the next save sends it to the coordinator."""
        kind = next((kind.__name__ for kind in (FormatError, DataError) if isinstance(error, kind)), "")
        self._failed = (kind, str(error)) if kind else None

    def _give_up(self, failed: Sequence[str] | None) -> None:
        """Remove what a save that failed has left. failed: on any rank, kind and message; None: nobody knows."""
        job, self._job = self._job, None
        if job is not None:
            kind, message = failed or ("", "")
            error = {"FormatError": FormatError, "DataError": DataError}.get(kind, RankError)(message)
            self._opened.writer.give_up(job, error)

    def close(self) -> None:
        """Drain what waits, on the coordinator, close the folder and free the memory; twice is harmless.

        Raises: what a drain failed with.
        """
        self._give_up(None)
        try:
            self._opened.finish()
        finally:
            _unpickled.pop(self._identity, None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return _digits(checkpoint_id) is not None


#: Writers of this process, by their identity; those that were unpickled have no other owner.
_writers: weakref.WeakValueDictionary[str, StoreWriter] = weakref.WeakValueDictionary()
_unpickled: dict[str, StoreWriter] = {}


def _writer_of(identity: str, arguments: dict[str, Any]) -> StoreWriter:
    """Return the writer that was pickled: the one that is in this process, or a new one."""
    writer = _writers.get(identity)
    if writer is None:
        writer = _unpickled[identity] = StoreWriter(**arguments)
        writer._identity, writer._thread = identity, None
        _writers[identity] = writer
    return writer


class StoreReader(StorageReader):
    """Reads snapshots of a store for `dcp.load`, whoever wrote them, on any number of ranks.

    Memory of a rank: what it loads, and some stored parts of it at a time.
    """

    def __init__(
        self,
        folder: StoreConfig | str | os.PathLike[str],
        *,
        ranks: Callable[[], Ranks] = ranks_of_this_job,
        trace: str | os.PathLike[str] | Recorder | None = None,
        report: Callable[[str], None] | None = print_report,
        **arguments: Unpack[StoreArguments],
    ) -> None:
        """Open a store.

        folder, arguments: as of `StoreWriter`; those that are of saves change nothing.
        ranks: those that load together, all of the job; `alone` where only some do (process_group=, no_dist=True):
            then each looks at the folder itself, which on a network file system may be as it was a while ago.
        trace, report: as of `penstock.checkpoint.SnapshotStore`. The file is another than that of a writer.

        Raises: ConfigError naming the argument; DataError if the trace cannot be written.
        """
        settings = store_config(folder, arguments).settings
        self._catalog = Catalog(open_tiers(settings))
        self._ranks, self._threads = made_ranks(ranks), settings.threads
        report = checked_report(report)
        telling = quiet(report if self._ranks.rank == 0 else None)
        spans = SnapshotSpans(checked_trace(trace), self._ranks.rank, telling)
        self._restorer = Restorer(self._catalog, self._ranks, self._threads, spans, telling)
        #: As of the last `reset`; None: the snapshot that was saved last.
        self._checkpoint_id: str | os.PathLike[str] | None = None
        #: Chosen by it, and not read yet; None: nothing is.
        self._chosen: int | None = None
        #: Where what `read_metadata` described is read.
        self._chains: Sequence[Sequence[Link]] = ()
        #: By fqn, as `read_metadata` found them: arrays and values without arrays.
        self._arrays: dict[str, ArrayLeaf] = {}
        self._plain: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, on all ranks.

        checkpoint_id: the step, as of `StoreWriter.reset`; None: the snapshot that was saved last.
        Raises: ConfigError if there is no such snapshot; DataError; WaitTimeout naming ranks that do not come; all of
            that on all ranks.
        """
        self._checkpoint_id = checkpoint_id
        self._chosen = self._choose()

    def _choose(self, *, is_again: bool = False) -> int:
        """Look, on rank 0, and return the step of a snapshot that can be opened as far as is seen."""

        def choose(steps_of_ranks: list[int | None]) -> int:
            step = self._restorer.choose(steps_of_ranks[0], is_again=is_again)
            self._catalog.chains(step)
            return step

        chosen: int = self._ranks.gather_then_decide(
            "the choice of a snapshot", lambda: _step_of(self._checkpoint_id), choose
        )
        return chosen

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return what there is: of the snapshot of the last `reset`, else of the one that was saved last.

        All ranks call it. What was removed meanwhile is looked for again.
        Raises: FormatError, DataError; as `reset`, if that was not called.
        """
        # DCP calls `reset` only where it is given a checkpoint_id.
        chosen = self._chosen

        def attempt(is_again: bool) -> Metadata:
            step = self._choose(is_again=is_again) if is_again or chosen is None else chosen
            self._chains = self._restorer.chains(step)
            return self._restorer.read(self._chains, self._metadata, is_state=False)

        try:
            return looking_again(attempt)
        finally:
            self._chosen = self._checkpoint_id = None

    def _metadata(self, chain: Chain) -> Metadata:
        parts = parts_by_name(chain.manifest)
        tree = tree_of(chain.manifest, parts)
        leaves: dict[int, ArrayLeaf] = {}
        outline = _outline(tree.root, leaves)
        try:
            # DCP itself says what it would call the values of such a state, and which of them it takes for one.
            flat, paths = flatten_state_dict(outline)
        except ValueError as error:
            raise ConfigError(
                f"step {chain.manifest.step} has two values of one name in DCP ({error}): restore it with SnapshotStore"
            ) from None
        described: dict[str, Any] = {}
        self._arrays, self._plain = {}, {}
        for fqn, value in flat.items():
            leaf = leaves.get(id(value))
            if leaf is None and not holds_arrays(value):
                self._plain[fqn] = value
                described[fqn] = BytesStorageMetadata()
            if leaf is None:
                continue
            self._arrays[fqn] = leaf
            shape = torch.Size(leaf.view.shape)
            chunks = [ChunkStorageMetadata(torch.Size((0,) * len(shape)), shape)]
            if leaf.is_all:
                chunks = [
                    ChunkStorageMetadata(torch.Size(one.layout.box.offsets), torch.Size(one.layout.shape))
                    for one in parts[leaf.of]
                    if one.layout.box is not None and one.layout.values
                ] or chunks
            properties = TensorProperties(dtype=getattr(torch, leaf.view.dtype.name))
            described[fqn] = TensorStorageMetadata(properties, shape, chunks)
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
        """Read what a rank needs, on all ranks; done when it returns.

        Raises: on all of them, FormatError naming file and tensor; DataError, also if it was removed meanwhile.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                # DCP unpickles what it is given: made here, of values that were read as our own JSON.
                pickled = io.BytesIO()
                torch.save(self._plain[item.storage_index.fqn], pickled)
                pickled.seek(0)
                planner.load_bytes(item, pickled)
        self._restorer.read(self._chains, lambda chain: self._read_tensors(chain, plan, planner))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(self, chain: Chain, plan: LoadPlan, planner: LoadPlanner) -> None:
        parts = parts_by_name(chain.manifest)
        chunks = {
            (stored.layout.name, stored.layout.box.offsets): [stored]
            for stored in chain.manifest.tensors
            if stored.layout.box is not None and stored.layout.values
        }
        #: The items of what is being read.
        items: dict[Wanted, tuple[ReadItem, torch.Tensor]] = {}

        def wanted() -> Iterator[Wanted]:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    continue
                leaf = self._arrays[item.storage_index.fqn]
                layout = parts[leaf.of][0].layout.whole
                if leaf.is_all:
                    layout = _part_of(layout, item)
                stored = chunks.get((leaf.of, tuple(item.storage_index.offset or ())), parts[leaf.of])
                target = planner.resolve_tensor(item).detach()
                out = _memory_of(target, layout) if leaf.is_all else None
                one = Wanted(layout, stored, np.empty(layout.nbytes, np.uint8) if out is None else out)
                items[one] = item, target
                yield one

        with Workers(self._threads, f"penstock-decode-{chain.manifest.step}") as workers:
            for one in read_wanted(chain, wanted(), workers):
                item, target = items.pop(one)
                leaf = self._arrays[item.storage_index.fqn]
                source = _as_torch(one.layout, one.out)
                if not leaf.is_all:
                    source = _viewed(leaf, one.out, item)
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return _digits(checkpoint_id) is not None


def step_named(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """Return the step of a checkpoint id. Raises: ConfigError if it ends in no number of a step."""
    step = _digits(checkpoint_id)
    if step is None:
        given = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
        raise ConfigError(
            f'checkpoint_id is {given!r:.80}; it must be the step, such as "1200" or "step-1200"'
        )
    return step


def _step_of(checkpoint_id: str | os.PathLike[str] | None) -> int | None:
    return None if checkpoint_id is None else step_named(checkpoint_id)


def _digits(checkpoint_id: str | os.PathLike[str] | int) -> int | None:
    if isinstance(checkpoint_id, bool) or not isinstance(checkpoint_id, (int, str, os.PathLike)):
        return None
    text = str(checkpoint_id if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id))
    found = re.search(r"(?<![0-9])[0-9]{1,18}(?=/*$)", text)
    return int(found[0]) if found and not text.startswith("-") else None


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
    name = _name(_path(item.index.fqn, paths))
    shape, whole, offsets = tuple(data.chunk.sizes), tuple(data.size), tuple(data.chunk.offsets)
    type_name = str(data.properties.dtype).removeprefix("torch.")
    if type_name in QUANTIZED:
        raise ConfigError(f"{name} is of {type_name}, which DCP cannot describe: save it with SnapshotStore")
    try:
        dtype = dtype_named(type_name)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return Layout(name, dtype, shape, None if shape == whole else Box(whole, offsets))


def _source(item: WriteItem, planner: SavePlanner, paths: _Paths) -> Source:
    """Return a tensor of the plan, where it is. Raises: ConfigError naming one that a snapshot does not hold."""
    layout = _layout(item, paths)
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor), "an item that is no BYTE_IO is a tensor"
    tensor = value.detach()
    try:
        (source,) = flatten({"value": Shard(tensor, tensor.shape, (0,) * tensor.ndim)}).sources
    except ConfigError as error:
        raise ConfigError(f"{layout.name}: {error}") from None
    if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{layout.dtype.name}", layout.shape):
        raise ConfigError(
            f"{layout.name} is planned as {layout.dtype.name} of shape {layout.shape}, and the planner gives "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return replace(source, layout=layout)


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
            f"{name} is {describe_type(value)} with an array or many bytes in it, and DCP takes it for one value: save "
            "arrays as tensors, in mappings or lists"
        )
    tree: Any = flat.tree
    return tree["map"]["value"]


def _array(name: str) -> Any:
    return {"array": {"of": name, "kind": "torch"}}


def _planned_tree(plans: Iterable[SavePlan], paths: _Paths) -> Any:
    """Return about the tree that will be, before any rank has given its plain values."""
    leaves: dict[_Path, Any] = {}
    for item in (item for plan in plans for item in plan.items):
        path = _path(item.index.fqn, paths)
        plain = item.type == WriteItemType.BYTE_IO
        leaves[path] = " " * _PLAIN_BYTES if plain else _array(_name(path))
    return _tree(leaves)


def _tree(leaves: Mapping[_Path, Any]) -> Any:
    """Return the tree with a node at each path; in a path DCP has a number for a place in a list, and nothing else."""
    if () in leaves:
        return leaves[()]
    inner: dict[str | int, dict[_Path, Any]] = {}
    for path, node in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = node
    nodes = {key: _tree(parts) for key, parts in inner.items()}
    places = [key for key in nodes if isinstance(key, int)]
    if places and len(places) == len(nodes) and max(places) < 2 * len(places) + _MOST_GAPS:
        # What is missing is a mapping without values, of which DCP says nothing.
        return [nodes.get(index, {"map": {}}) for index in range(max(places) + 1)]
    return write_mapping(nodes, nodes.values())


def _outline(node: Node, leaves: dict[int, ArrayLeaf]) -> Any:
    """Return a state without its numbers. leaves: gets each array's leaf, by the id of the tensor in its place."""
    if isinstance(node, ArrayLeaf):
        if node.text_bytes or node.quantizer is not None:
            raise ConfigError(
                f"{node.name} is of {node.type_name}, which DCP cannot describe: restore it with SnapshotStore"
            )
        tensor = torch.empty(0, device="meta")
        # DCP would ask for bytes, which are kept as an array if they are many, as for a value.
        if node.kind != "bytes":
            leaves[id(tensor)] = node
        return tensor
    if isinstance(node, MappingNode):
        keys = [decode_key(key, torch) for key in node.keys]
        return {key: _outline(part, leaves) for key, part in zip(keys, node.parts, strict=True)}
    if isinstance(node, SequenceNode):
        parts = [_outline(part, leaves) for part in node.parts]
        return tuple(parts) if node.is_tuple else parts
    return decode_plain(node.value, torch)


# -- Numbers ---------------------------------------------------------------------------------------------------


def _part_of(layout: Layout, item: ReadItem) -> Layout:
    """Return what an item wants of a tensor: a part of one of its chunks."""
    shape = tuple(item.lengths)
    chunk = item.storage_index.offset or (0,) * len(shape)
    offsets = tuple(begin + inner for begin, inner in zip(chunk, item.storage_offsets, strict=True))
    return Layout(
        layout.name, layout.dtype, shape, None if shape == layout.shape else Box(layout.shape, offsets)
    )


def _memory_of(target: torch.Tensor, layout: Layout) -> Bytes | None:
    """Return the memory of a target into which numbers can go as they are; None if they have to be copied."""
    is_there = target.is_cpu and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if (
        not is_there
        or str(target.dtype) != f"torch.{layout.dtype.name}"
        or tuple(target.shape) != layout.shape
    ):
        return None
    return memory_at(target.data_ptr(), layout.nbytes, target, writable=True)


def _as_torch(layout: Layout, data: Bytes) -> torch.Tensor:
    tensor = torch.from_numpy(data).view(getattr(torch, layout.dtype.name))
    return tensor.reshape(layout.shape)


def _viewed(leaf: ArrayLeaf, data: Bytes, item: ReadItem) -> torch.Tensor:
    """Return what an item wants of an array that is a view of its tensor, whose bytes are here."""
    place = tuple(
        slice(begin, begin + length) for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    part = np.ascontiguousarray(leaf.view.over(data)[place]).view(np.uint8).reshape(-1)
    return _as_torch(Layout(leaf.name, leaf.view.dtype, tuple(item.lengths)), part)
