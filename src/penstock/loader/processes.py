"""Worker processes of a loader, from its side: two decode threads drive each, and wait while it does their Loads.

    decode thread   Load ──> channel ──> its process: fetch, decode ──> rows of the slot, in shared memory
                    failed samples, what is no array <── channel <──┘

So the engine is what it is with threads, and any number of processes gives the same batches. With two threads the next
Load is there when a process has done one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arena import Arena
from penstock.child import NoChild
from penstock.errors import ClosedError, DataError
from penstock.flow.channel import Channel, Reducers
from penstock.flow.pieces import Pieces
from penstock.flow.staging import Field, StagingBuffer
from penstock.flow.work import Brought, Fetcher, FetcherOver, Request
from penstock.forkserver import ForkedChild, fork_child
from penstock.loader.fetching import SourceFetcher, located
from penstock.loader.global_draws import ONE_THREAD
from penstock.loader.pickling import Pickled, pickled
from penstock.loader.worker import (
    Answer,
    Begin,
    Copy,
    MovableDecoder,
    PackedError,
    Task,
    the_dataset,
    unpack,
)
from penstock.policy import Load
from penstock.policy.decisions import LOAD_SECONDS

THREADS_A_PROCESS = 2
#: A Load of a process takes as long as one may, if there are samples: to hand it over takes 0.5 ms of this process, and
#: all processors have work. Of samples of 0.25 ms, 16 in a Load, that was a tenth of the time; of 64 it is a fortieth.
PROCESS_LOAD_SECONDS = LOAD_SECONDS
#: So often a thread that waits for its process looks whether that is alive, and since when it is at a sample.
_LOOK_SECONDS = 0.5
#: A process that ends gets so long, as does a Load that nobody wants any more.
_END_SECONDS = 1.0
_PAGE_BYTES = 4096
_NOWHERE = -1
#: Large libraries whose import starts no thread and uses no device: in all processes, if this one has them.
_IMPORTED_ONCE = ("torch", "torch.utils.data")
_EXIT_REASONS = {
    signal.SIGKILL: "by the kernel, if memory ran out: see `dmesg`, and take fewer worker processes or more memory",
    signal.SIGSEGV: "in compiled code that the data set calls: `python -X faulthandler` shows where",
    signal.SIGBUS: "as shared memory ran out: take fewer worker processes, or less memory=",
}


def reads_here(fetcher: Fetcher) -> bool:
    """Whether worker processes decode what this process reads, from a source or a tier."""
    return isinstance(fetcher, SourceFetcher)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What worker processes are started with, known before any is.

    dataset: pickled before anything has called it. init: called in each process with its number. collate: of a loader.
    """

    count: int
    seed: int
    dataset: Pickled
    source: Any
    init: Callable[[int], object] | None
    reducers: Reducers
    collate: Callable[..., Any] | None = None


class Processes(FetcherOver):
    """A `Fetcher` and a `Decoder` whose work worker processes do. Threads that call `begin` have one in turn.

    fetcher, decoder: that the processes have copies of; here they name samples and finish batches.
    staging: of shared memory.
    """

    def __init__(
        self, plan: ProcessPlan, fetcher: Fetcher, decoder: MovableDecoder, staging: StagingBuffer
    ) -> None:
        super().__init__(fetcher)
        self._plan, self._decoder, self._staging = plan, decoder, staging
        self._reads_here = reads_here(fetcher)
        self._parts = self._pickled_parts()
        #: Counts what `renew` did.
        self._version = 0
        self._threads = threading.local()
        self._all: list[_Process] = []
        self._begun = 0
        #: Whether a thread starts one.
        self._is_beginning = False
        self._all_lock = threading.Lock()
        #: When nobody wanted results any more.
        self._ending: float | None = None

    def begin(self) -> None:
        """Start the process of the calling thread, unless another thread of it did, and do not wait for it."""
        with self._all_lock:
            if hasattr(self._threads, "process"):
                return
            number = self._begun % self._plan.count
            self._begun += 1
            if number == len(self._all):
                process = _Process(self._plan, self._parts, number, self._staging)
                self._is_beginning = True
                try:
                    process.start()
                finally:
                    self._is_beginning = False
                self._all.append(process)  # none that did not start
            self._threads.process = self._all[number]

    def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raises: ClosedError after `end_waits`; what keeps one from beginning.
        """
        with self._all_lock:
            for number in range(self._plan.count):
                self._all.append(_Process(self._plan, self._parts, number, self._staging))
                self._all[number].start()
        for each in self._all:
            each.await_ready(self._describe, self._is_given_up)

    def _pickled_parts(self) -> Pickled:
        plan = self._plan
        return pickled(
            (None if self._reads_here else self._fetcher, self._decoder, dict(plan.reducers), plan.init),
            "what it decodes by" if self._reads_here else "the data set",
            plan.reducers,
            known=plan.source,
            found_by=the_dataset,
            parts={"collate_fn": plan.collate, "worker_init_fn": plan.init},
        )

    @property
    def starting(self) -> int:
        """How many processes have been started and are not ready yet."""
        return sum(not each.is_ready for each in list(self._all))

    @property
    def is_starting(self) -> bool:
        """Whether a Load may wait because a process imports what it needs: none is ready, or one that has a Load.

        What is read here is read before a process has it, and may hang.
        """
        known = list(self._all)
        if self._is_beginning or any(each.tasks and not each.is_ready for each in known):
            return True
        return not self._reads_here and not any(each.is_ready for each in known)

    @property
    def repeats_script(self) -> str:
        """Why the processes would run the program's script once more, which they import; empty if they would not.

        They import it for what is defined there. It runs again unless a line of it looks at `__name__`.
        """
        path = getattr(sys.modules["__main__"], "__file__", None)
        if path is None or not (self._plan.dataset.main or self._parts.main):
            return ""
        try:
            is_guarded = "__name__" in Path(path).read_text("utf-8")
        except (OSError, ValueError):  # it may be no text
            return ""
        return (
            ""
            if is_guarded
            else f"worker processes import {path!r}, which has no `if __name__ == '__main__':`"
        )

    def renew(self) -> None:
        """Have each process begin its next Load as a new one would, if the data set has changed or there is an init.

        Raises: ConfigError where the data set cannot be pickled any more.
        """
        plan = self._plan
        dataset = pickled(plan.source, "dataset", plan.reducers, before=plan.dataset)
        if dataset is not plan.dataset or plan.init is not None:
            self._plan = replace(plan, dataset=dataset)
            self._parts = self._pickled_parts()
            self._version += 1

    # As a fetcher

    @property
    def place(self) -> str:
        starting = self.starting
        waits = f", which waits for worker processes to start ({starting} of {self._plan.count})"
        return f"{super().place}{waits if starting else ''}"

    def fetch(self, request: Request) -> list[Any] | Pieces:
        """Return bytes; or nothing of each sample of a data set, where `decode` has the process make it."""
        if self._reads_here:
            return self._fetcher.fetch(request)
        return [None] * request.ids.size

    def end_waits(self) -> None:
        """Give processes a second to complete what nobody wants any more."""
        super().end_waits()
        self._ending = time.monotonic()

    def close(self) -> None:
        """End the processes and wait for them. No thread runs any more. Twice is harmless."""
        self.close_processes()
        super().close()

    def close_processes(self) -> None:
        """End the processes and wait for them, while no thread asks them. Twice is harmless."""
        with self._all_lock:
            for each in self._all:
                each.end()
            deadline = time.monotonic() + _END_SECONDS
            for each in self._all:
                each.wait(deadline)

    # As a decoder

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._decoder.fields

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Nothing is read here."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[Any], None]
    ) -> list[tuple[int, Exception]]:
        """Have this thread's process do a Load; see `Decoder`. Raises: as `done`."""
        failed, others = self.done(load, brought, at)
        self._decoder.put(load.slot, _without(brought.rows, [index for index, _ in failed]), others)
        return failed

    def done(
        self, load: Load, brought: Brought, at: Callable[[Any], None]
    ) -> tuple[list[tuple[int, Exception]], Any]:
        """Have this thread's process do a Load, and keep nothing of it beside the slot.

        Returns: which samples failed, as `Decoder.decode`, and what the decoder there returned by `take`.
        Raises: DataError if the process has died.
        """
        self.begin()
        newest = self._version, self._plan, self._parts
        task = Task(
            load._replace(origins=[], entries=[]),
            brought._replace(data=list(brought.data)) if self._reads_here else None,
        )
        with self._idlest() as process:
            answer = process.do(task, newest, at, self._describe, self._is_given_up)
        failed = [(index, unpack(error)) for index, error in answer.failed]
        if self._reads_here:
            failed = [
                (index, located(error, int(brought.ids[index]), self._fetcher.describe))
                for index, error in failed
            ]
        return failed, answer.others

    @contextlib.contextmanager
    def _idlest(self) -> Iterator[_Process]:
        """Lend the process that has least to do, this thread's unless another has less.

        Two threads that begin at the same time may be of one process, while another has nothing to do.
        """
        own = self._threads.process
        with self._all_lock:
            found = min(self._all, key=lambda each: (each.tasks, each is not own))
            found.tasks += 1
        try:
            yield found
        finally:
            with self._all_lock:
                found.tasks -= 1

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        return self._decoder.finish(slot, arrays, rows)

    def _describe(self, sample: int) -> str:
        return f"sample {sample} ({self._fetcher.describe(sample)})"

    def _is_given_up(self) -> bool:
        return self._ending is not None and time.monotonic() - self._ending > _END_SECONDS


class _Position:
    """Where a thread is that has given its Load to a process: at the sample that the process is at, see `Latest`.

    process: int64[...], the first of which is that sample, as the process notes it. is_next: whether this Load is the
    next one that it answers.
    """

    def __init__(self, process: NDArray[np.int64]) -> None:
        self._process, self.is_next = process, False

    @property
    def latest(self) -> int:
        return int(self._process[0]) if self.is_next else _NOWHERE


class _Process:
    """One worker process. It answers in the order in which it is asked, by any thread."""

    def __init__(self, plan: ProcessPlan, parts: Pickled, number: int, staging: StagingBuffer) -> None:
        self._plan, self._parts, self._number, self._staging = plan, parts, number, staging
        self._version = 0
        self.is_ready = False
        #: How many it has been given and not answered; the lock of all processes guards it.
        self.tasks = 0
        #: Whether it was sent Begin and no thread waits for the answer yet; why it could not begin.
        self._has_begun = False
        self._refusal: Exception | None = None
        self._send_lock = threading.Lock()
        #: Held by the thread that asked last, until it has its answer.
        self._latest = threading.Lock()
        self._child: ForkedChild | None = None
        self._channel: Channel | None = None
        #: The sample that it is at, which it writes there itself: known also of one that has died.
        self._page = Arena(_PAGE_BYTES, is_shared=True)
        self._at = self._page.array.view(np.int64)
        self._at[0] = _NOWHERE

    def start(self) -> None:
        """Start it. Raises: DataError where no process can be started."""
        own, its = socket.socketpair()
        try:
            self._child = fork_child(
                "penstock.loader.worker:serve",
                ["penstock.loader.worker", *(name for name in _IMPORTED_ONCE if name in sys.modules)],
                stdin=its.fileno(),
                environment={name: value for name, value in ONE_THREAD.items() if name not in os.environ},
            )
        except NoChild as error:
            own.close()
            raise _no_process(str(error)) from error
        finally:
            its.close()
        self._channel = Channel(own, self._plan.reducers)
        self._begin()

    def _begin(self) -> None:
        """Have it begin, or begin anew."""
        self.is_ready, self._has_begun = False, True
        assert self._channel is not None, "it was started"
        dataset, parts = self._plan.dataset, self._parts
        assert self._staging.arena is not None, "slots are shared"
        arenas = [
            self._page,
            self._staging.arena,
            *(each.arena for each in (dataset, parts) if each.arena is not None),
        ]
        begin = Begin(
            self._number,
            self._plan.count,
            self._plan.seed,
            self._staging.batch_size,
            _prepare(),
            Copy(dataset.data, dataset.extents, dataset.main),
            Copy(parts.data, parts.extents, parts.main),
            (dataset.arena is not None, parts.arena is not None),
        )
        try:
            self._channel.send(begin, [arena.descriptor for arena in arenas])
        except OSError:
            raise self._death(None) from None

    def do(
        self,
        task: Task,
        newest: tuple[int, ProcessPlan, Pickled],
        at: Callable[[Any], None],
        describe: Callable[[int], str],
        is_given_up: Callable[[], bool],
    ) -> Answer:
        """Have it do a task. newest: what it is to have begun with, and the version of that.

        Raises: DataError if it died; what has kept it from beginning.
        """

        def send() -> None:
            if newest[0] != self._version:
                self._version, self._plan, self._parts = newest
                self._begin()
            self._send(task, describe)

        position = _Position(self._at)
        at(position)
        with self._asked(send, describe, is_given_up):
            position.is_next = True
            answer = self._receive(describe, is_given_up, lambda: at(position))
        if isinstance(answer, PackedError):
            raise unpack(answer)
        assert isinstance(answer, Answer), "a task is answered so"
        return answer

    def await_ready(self, describe: Callable[[int], str], is_given_up: Callable[[], bool]) -> None:
        """Wait until it has begun. Raises: as `do`."""
        with self._asked(lambda: None, describe, is_given_up):
            pass

    @contextlib.contextmanager
    def _asked(
        self,
        send: Callable[[], None],
        describe: Callable[[int], str],
        is_given_up: Callable[[], bool],
    ) -> Iterator[None]:
        """Ask, and enter once the next answer is the one to that. Answers come in the order of the questions."""
        mine = threading.Lock()
        with mine:
            with self._send_lock:
                earlier, self._latest = self._latest, mine
                send()
                has_begun, self._has_begun = self._has_begun, False
            with earlier:
                pass
            if has_begun:
                self._await_ready(describe, is_given_up)
            yield

    def _send(self, task: Task, describe: Callable[[int], str]) -> None:
        assert self._channel is not None, "it was started"
        try:
            self._channel.send(task)
        except OSError:
            if self.is_ready:  # else it has said why it has ended
                raise self._death(describe) from None

    def _await_ready(self, describe: Callable[[int], str], is_given_up: Callable[[], bool]) -> None:
        ready = self._receive(describe, is_given_up, lambda: None)
        if ready.error is not None:
            error = unpack(ready.error)
            error.add_note(f"while worker process {self._number} imported the data set and what it uses")
            self._refusal = error
            raise error
        self.is_ready = True

    def _receive(
        self, describe: Callable[[int], str], is_given_up: Callable[[], bool], moved: Callable[[], None]
    ) -> Any:
        """Return the next answer. moved: called when the process was seen at another sample, since about then."""
        assert self._channel is not None, "it was started"
        assert self._child is not None, "it was started"
        seen = _NOWHERE
        while True:
            try:
                return self._channel.receive(_LOOK_SECONDS)[0]
            except TimeoutError:
                sample = int(self._at[0])
                if sample != seen:
                    seen = sample
                    moved()
                if is_given_up():
                    self._child.kill()
                    raise ClosedError("this loader was closed while a worker process was at work") from None
                # A process that this one has forked meanwhile may keep the channel open.
                if self._child.poll() is not None:
                    raise self._death(describe) from None
            except (EOFError, OSError):
                raise self._death(describe) from None

    def _death(self, describe: Callable[[int], str] | None) -> Exception:
        """Return what to raise where the process has ended by itself."""
        if self._refusal is not None:
            return self._refusal
        assert self._child is not None, "it was started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_SECONDS)
        if self._child.refusal is not None:
            return _no_process(self._child.refusal)
        code = self._child.returncode
        if code is None:
            how = "does not answer any more"
        elif code < 0:
            number = signal.Signals(-code)
            reason = f", {_EXIT_REASONS[number]}" if number in _EXIT_REASONS else ""
            how = f"was killed by {number.name}{reason}"
        else:
            how = f"ended with exit code {code}, as by os._exit() or sys.exit() in the data set's code"
        sample = int(self._at[0])
        where = "before its first sample" if sample < 0 or describe is None else f"at {describe(sample)}"
        return DataError(f"worker process {self._number} (pid {self._child.pid}) died {where}: it {how}")

    def end(self) -> None:
        """Have it end once it has done what it is at."""
        if self._channel is not None:
            self._channel.close()

    def wait(self, deadline: float) -> None:
        """Wait until it has ended, and kill it if it has not by then."""
        if self._child is None:
            return
        try:
            self._child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _no_process(reason: str) -> DataError:
    return DataError(f'worker processes cannot be started ({reason}): take workers="threads"')


def _without(rows: Sequence[int], failed: list[int]) -> Sequence[int]:
    if not failed:
        return rows
    return [row for index, row in enumerate(rows) if index not in set(failed)]


def _prepare() -> dict[str, Any]:
    """Return how a process finds modules and files as this one does."""
    folder = os.getcwd()
    return {"sys_path": [place or folder for place in sys.path], "sys_argv": sys.argv, "dir": folder}
