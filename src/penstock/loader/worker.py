"""A worker process: calls a data set, and writes what it returns into the batch slots of the loader's process.

    Begin   who it is, and how to import what the loader's process has imported; once more to begin anew
    Task    a Load ──> fetch, decode ──> rows of the slot, and `Answer`: what failed, what is no array

It ends when its parent does, or closes the channel. See docs/howto/worker-processes.md.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import mmap
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.errors import ConfigError, DataError
from penstock.flow.channel import Channel, Reducers
from penstock.flow.staging import slot_arrays, slot_begin
from penstock.flow.work import Brought, Decoder, Fetcher, Request, without_failed
from penstock.heap import keep_freed_memory
from penstock.loader.global_draws import allocate_alone, compute_alone, seed_all, set_worker_info
from penstock.policy import Load


class Copy(NamedTuple):
    """See `penstock.loader.pickling.Pickled`, whose arena's descriptor comes with the message."""

    data: bytes
    extents: list[slice]
    main: dict[str, str]


class Begin(NamedTuple):
    """The first message, and any that has it begin anew. Its descriptors: of a page of memory where the process writes
    the sample that it is at, of the batch slots, and of the arenas of the two copies where they have one.

    number: of the process among `processes`. prepare: see `multiprocessing.spawn.prepare`.
    parts: of (fetcher, decoder, reducers, init), the last what is called with the process's number. The fetcher is None
        where the parent reads.
    """

    number: int
    processes: int
    seed: int
    batch_rows: int
    prepare: dict[str, Any]
    dataset: Copy
    parts: Copy
    has_arenas: tuple[bool, bool]


class Task(NamedTuple):
    """A Load to do. brought: what is to be decoded, where the parent reads; None where the process's fetcher does."""

    load: Load
    brought: Brought | None


class PackedError(NamedTuple):
    """An error for another process. data: pickled; None where that cannot be. name, notes; text: traceback or ""."""

    data: bytes | None
    name: str
    notes: list[str]
    text: str


class Answer(NamedTuple):
    """failed: by index in the Load. others: what `Decoder.take` returned."""

    failed: list[tuple[int, PackedError]]
    others: Any


class Ready(NamedTuple):
    """The answer to `Begin`. error: that has kept it from beginning."""

    error: PackedError | None


class TracebackText(Exception):
    """Where an error was raised in a worker process: its cause, and never raised itself."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack(error: BaseException) -> PackedError:
    """Return an error in a form that always reaches the other process."""
    text = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many an error's class takes other arguments than it keeps
    except Exception:
        data = None
    notes = getattr(error, "__notes__", [])
    return PackedError(data, f"{type(error).__name__}: {error}", notes, text)


def unpack(packed: PackedError) -> Exception:
    """Return the error of another process: of its type where that can be, with the traceback there as its cause."""
    error: BaseException | None = None
    if packed.data is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(packed.data)
    if not isinstance(error, Exception):
        error = DataError(packed.name)
        error.__notes__ = list(packed.notes)
    if packed.text:
        error.__cause__ = TracebackText(packed.text)
    return error


class MovableDecoder(Decoder, Protocol):
    """A decoder that can be pickled before it is used, and whose copy in another process writes to the same slots."""

    def apart(self) -> MovableDecoder:
        """Return one that decodes the same in this process, and has nothing but the slots in common with this one."""
        ...

    def take(self, slot: int, rows: Sequence[int]) -> Any:
        """Return what it keeps of some rows that were decoded, besides their arrays, and keep it no longer."""
        ...

    def put(self, slot: int, rows: Sequence[int], what: Any) -> None:
        """Keep what its copy in another process returned by `take` for these rows."""
        ...


#: Whether this process imports its parent's `__main__`, which must not make loaders meanwhile.
_is_importing_main = False
_dataset: Any = None


class MadeAgain(BaseException):
    """Ends the import of a script that makes a loader, even one that catches errors and would go on to the next loader.

    error: for the parent, which imports nothing.
    """

    def __init__(self) -> None:
        self.error = ConfigError(
            "this script makes a loader as soon as it is imported, and a worker process imports it to find the data "
            "set's class: put what the script does under `if __name__ == '__main__':`, or the class into a module"
        )
        super().__init__(str(self.error))


def check_not_importing() -> None:
    """Raise MadeAgain in a worker process that imports the script of its parent, which makes a loader again."""
    if _is_importing_main:
        raise MadeAgain


def the_dataset() -> Any:
    """Return the data set of this process, for what is unpickled."""
    return _dataset


class _Unpickler(pickle.Unpickler):
    """Imports the parent's `__main__` when something of it is first wanted."""

    def __init__(self, copy: Copy, buffers: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(copy.data), buffers=buffers)
        self._main = copy.main

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main:
            global _is_importing_main
            main, self._main = self._main, {}
            _is_importing_main = True
            try:
                spawn.prepare(main)  # which does nothing where it was imported before
            finally:
                _is_importing_main = False
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            if module != "__main__":
                raise
            raise ConfigError(
                f"{name} is not there where a worker process imports the script that defines it: define it at the top "
                'of the script or in a module, or take workers="threads"'
            ) from error


def _restored(copy: Copy, descriptor: int | None) -> Any:
    """Return what was pickled. Its arrays are over the memory that all processes share, until one writes to them."""
    if descriptor is None:
        return _Unpickler(copy, ()).load()
    memory = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), np.uint8)
    os.close(descriptor)
    return _Unpickler(copy, [memory[extent] for extent in copy.extents]).load()


class Worker:
    """What a worker process has: its copies of the fetcher and the decoder, and the slots of its parent.

    Raises: whatever the user's own code does, when it is imported or made again.
    """

    def __init__(self, begin: Begin, descriptors: list[int]) -> None:
        global _dataset
        spawn.prepare(begin.prepare)
        self._at = Arena.attach(descriptors.pop(0)).array.view(np.int64)
        with Arena.attach(descriptors.pop(0)) as arena:
            self._memory = arena.mapping
        opened = [descriptors.pop(0) if has_arena else None for has_arena in begin.has_arenas]
        _dataset = _restored(begin.dataset, opened[0])
        self._fetcher: Fetcher | None
        self._decoder: MovableDecoder
        self.reducers: Reducers
        init: Callable[[int], object] | None
        self._fetcher, self._decoder, self.reducers, init = _restored(begin.parts, opened[1])
        self._seed, self._batch_rows = begin.seed, begin.batch_rows
        self._slots: dict[int, tuple[NDArray[Any], ...]] = {}
        self._epoch = 0
        own_seed = begin.seed + begin.number
        seed_all(own_seed, "worker process")
        set_worker_info(begin.number, begin.processes, own_seed, _dataset)
        compute_alone()
        allocate_alone()
        if init is not None:
            init(begin.number)
            compute_alone()

    def do(self, task: Task) -> Answer:
        """Do a Load: write its rows."""
        load = task.load
        arrays = self._arrays_of(load.slot)
        self._epoch = load.epoch
        brought, had, failed = without_failed(task.brought or self._fetched(load))
        if had:
            wrong = self._decoder.decode(load, brought, arrays, self._begin_sample)
            failed += [(had[index], error) for index, error in wrong]
        return Answer(
            [(index, pack(error)) for index, error in failed], self._decoder.take(load.slot, brought.rows)
        )

    def _fetched(self, load: Load) -> Brought:
        assert self._fetcher is not None, "either process reads"
        data = self._fetcher.fetch(Request(load.ids, self._begin_sample, epoch=load.epoch))
        return Brought(load.rows, load.ids, list(data))

    def _arrays_of(self, slot: int) -> tuple[NDArray[Any], ...]:
        if slot not in self._slots:
            fields, rows = self._decoder.fields, self._batch_rows
            self._slots[slot] = slot_arrays(self._memory, fields, rows, rows, slot_begin(fields, rows, slot))
        return self._slots[slot]

    def _begin_sample(self, sample: int) -> None:
        """Note where this process is, and have what the sample draws depend on nothing else."""
        self._at[0] = sample
        seed_all(self._seed, f"epoch {self._epoch}, sample {sample}")


def serve() -> None:
    """Be a worker process, whose channel is its standard input."""
    channel = Channel(socket.socket(fileno=os.dup(0)))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError):
        _answer_all(channel)
    # What the data set's code registered is called; threads of its own are not waited for.
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _answer_all(channel: Channel) -> None:
    worker = _begun(channel, *channel.receive())
    while worker is not None:
        message, descriptors = channel.receive()
        if isinstance(message, Begin):
            worker = _begun(channel, message, descriptors)
            continue
        try:
            answer: Answer | PackedError = worker.do(message)
        except Exception as error:
            answer = pack(error)
        _send(channel, answer)


def _begun(channel: Channel, begin: Begin, descriptors: list[int]) -> Worker | None:
    """Return what does the Loads from here on; None where it cannot begin, which the parent then knows."""
    try:
        worker = Worker(begin, descriptors)
    except BaseException as error:
        channel.send(Ready(pack(error.error if isinstance(error, MadeAgain) else error)))
        return None
    channel.use(worker.reducers)
    channel.send(Ready(None))
    return worker


def _send(channel: Channel, answer: Answer | PackedError) -> None:
    try:
        channel.send(answer)
    except OSError:
        raise
    except Exception as error:  # what is no array cannot be pickled
        error.add_note("a worker process hands over what is no array, and what collate_fn returns, pickled")
        channel.send(pack(error))
