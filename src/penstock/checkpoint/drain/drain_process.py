"""A process that writes what a drain copies, so that the training's own interpreter has nothing to do with it.

    training     {"chain": ..., "decision": ..., "encoding": ...} ──▶ a line of JSON on the process's standard input
    the process  reads the fast tier, encodes, writes and syncs a part of the draft that the training began
                 ◀── {"written": ...} or {"failed": ...}, a line on its standard output

What a snapshot shall be, its commit and what goes after it stay with the training. The process begins while the first
large snapshot is saved, so that it is there when that is drained, and ends with the store or with its standard input: a
training that is killed leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.checkpoint.files.catalog import Catalog, Link, open_links
from penstock.checkpoint.files.manifest import folder_of
from penstock.checkpoint.files.parts import Part
from penstock.checkpoint.recipe import EncodingConfig, SnapshotDecision, WrittenPart, check_part
from penstock.checkpoint.staged import FromChain, ProcessEnded, write_staged
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.tiers.throttle import Cap
from penstock.child import NoChild, start_child
from penstock.errors import DataError, FormatError, PenstockError
from penstock.flow.cpus import give_way
from penstock.flow.ordered import Workers
from penstock.trace.trace import JSON

#: Its first line. What starts with an interpreter, such as a `sitecustomize`, may write to its output before.
_GREETING = b"penstock drains\n"
_LOOK_SECONDS = 0.05


class DrainProcess:
    """The process, as the training sees it. Asked by one thread."""

    def __init__(self, interrupt: threading.Event) -> None:
        """Begin, and wait for nothing. interrupt: once set, what is asked is broken off. Raises: NoChild."""
        self._interrupt = interrupt
        self._is_ready = False
        self._process = start_child(
            "penstock.checkpoint.drain.drain_process:serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"  # noqa: PT018
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def wait_until_ready(self) -> None:
        """Return once it has loaded what it needs. Raises: NoChild if it ended; DataError if it was interrupted."""
        if self._is_ready:
            return
        try:
            self._read_until(_GREETING)
        except BaseException as error:
            self.close()
            if isinstance(error, ProcessEnded) and not self._interrupt.is_set():
                raise NoChild(str(error)) from None
            raise
        self._is_ready = True

    def ask(self, request: JSON, *, to_its_end: bool = False) -> Any:
        """Return what a request is answered with. to_its_end: whether no interrupt counts.

        Raises: ProcessEnded; DataError if it was interrupted. It is closed then, and writes nothing more.
        """
        data = memoryview(json.dumps(request).encode() + b"\n")
        try:
            try:
                while data:
                    data = data[self._requests.write(data) :]  # a pipe takes what it has space for
            except BrokenPipeError:
                raise self._ended() from None
            return json.loads(self._read_until(b"\n", to_its_end=to_its_end))
        except BaseException:
            self.close()
            raise

    def _read_until(self, end: bytes, *, to_its_end: bool = False) -> bytes:
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not line.endswith(end):
                if self._interrupt.is_set() and not to_its_end:
                    raise DataError("a drain was broken off: the store is closed")
                if not selector.select(_LOOK_SECONDS):
                    continue
                data = os.read(self._answers.fileno(), 1 << 20)
                if not data:
                    raise self._ended()
                line += data
        return line

    def _ended(self) -> ProcessEnded:
        return ProcessEnded(self._process.wait())

    @property
    def is_closed(self) -> bool:
        """Return whether it answers no more."""
        return self._requests.closed

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


class ProcessDrainer:
    """Has snapshots drained by a process, which is begun for the first one and lives until `close`.

    Used by the thread that drains; any thread may `start` it ahead.
    """

    def __init__(
        self,
        fast: Path,
        slow: Path,
        encoding: EncodingConfig,
        threads: int,
        interrupt: threading.Event,
        report: Callable[[str], None],
        bytes_per_second: float | None = None,
    ) -> None:
        """fast, slow: folders of the tiers. encoding: how snapshots are written. threads: that encode.

        interrupt: once set, a drain is broken off. report: called once if no process can be started. bytes_per_second:
            that are written at most.
        """
        self._interrupt = interrupt
        self._report = report
        self._settings: dict[str, JSON] = {
            "fast": str(fast),
            "slow": str(slow),
            "codec": encoding.codec,
            "kept_mantissa_bits": encoding.kept_mantissa_bits,
            "threads": threads,
            "bytes_per_second": bytes_per_second,
        }
        #: held while the process is begun or closed
        self._starting = threading.Lock()
        self._process: DrainProcess | None = None
        self._is_refused = False
        #: Of the snapshot that is drained.
        self._waves: FromChain

    def start(self) -> None:
        """Begin a process where there is none, and wait for nothing: it loads what it needs for half a second."""
        with self._starting:
            if self._process is not None and self._process.is_closed:
                self._process = None
            if self._process is None and not (self._is_refused or self._interrupt.is_set()):
                try:
                    self._process = DrainProcess(self._interrupt)
                except NoChild as error:
                    self._refuse(error)
                except RuntimeError:
                    pass  # this interpreter is shutting down: the next process that saves here drains what is left

    def _refuse(self, error: NoChild) -> None:
        self._is_refused = True
        self._report(f"snapshots are drained by threads of this process: {error}")

    def begin(self, links: Sequence[Link], waves: FromChain) -> bool:
        """Begin a snapshot, which `write` and `check` are then of; return whether a process can be had.

        links: the copies that it is read from. waves: the same, which gets what is damaged.
        Raises: DataError if it is broken off.
        """
        self._settings["links"], self._waves = [list(link) for link in links], waves
        self.start()
        if self._process is None:
            return False
        try:
            self._process.wait_until_ready()
        except NoChild as error:
            self._refuse(error)
        return not self._is_refused

    def write(self, decision: SnapshotDecision) -> WrittenPart:
        """Write a part into a draft that was begun. Raises: FormatError, DataError, ProcessEnded."""
        try:
            return WrittenPart.read(self._ask("write", decision)["written"], 0)
        except ProcessEnded as error:
            if self._interrupt.is_set():
                raise DataError(str(error)) from error  # nobody is to write in its place
            raise

    def check(self, decision: SnapshotDecision, part: Part) -> None:
        """Read a committed part back, as `check_part` does. Raises: FormatError, DataError."""
        # Not broken off, nor left to a process that was killed: what is committed would pass for damaged.
        try:
            self._ask("check", decision, list(part), to_its_end=True)
        except ProcessEnded:
            check_part(LocalTier(str(self._settings["slow"])), decision, 0, part, to_its_end=True)

    def _ask(
        self, what: str, decision: SnapshotDecision, part: JSON = None, *, to_its_end: bool = False
    ) -> Any:
        assert self._process is not None, "it has begun"
        request: Any = {"do": what, "decision": decision, "part": part, **self._settings}
        answer = self._process.ask(request, to_its_end=to_its_end)
        if "failed" in answer:
            self._waves.is_damaged = answer["is_damaged"]
            raise (FormatError if answer["failed"] == FormatError.__name__ else DataError)(answer["message"])
        return answer

    def give_up(self, error: BaseException) -> None:
        """Begin no other process, for one has ended, and report that. error: how."""
        self._is_refused = True
        was_killed = isinstance(error, ProcessEnded) and error.was_killed
        self._report(
            f"snapshots are drained by threads of this process from here on: {error}"
            f"{'; a system that runs out of memory kills processes' if was_killed else ''}"
        )

    def close(self) -> None:
        with self._starting:
            if self._process is not None:
                self._process.close()


# The process itself


def serve() -> None:
    """Answer requests until the training ends or kills it."""
    # Not before: where the training leaves no processor, loading what it takes would last half a minute.
    give_way()
    # By their numbers, for a `sitecustomize` may have put something else in the place of these files. The training's
    # standard error may be closed; the next file that is opened would get its number, and what libraries write to it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    answers = os.fdopen(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3), "wb")
    os.dup2(nowhere if sys.stderr is None else 2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    answers.write(_GREETING)
    while True:
        answers.flush()
        answer = _answered(json.loads(requests.get()))
        answers.write(json.dumps(answer).encode() + b"\n")


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    """Take requests; end the process with its standard input, whatever is being written."""
    left = b""
    while data := os.read(0, 1 << 20):
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            requests.put(line)
    os._exit(0)


def _answered(request: Any) -> JSON:
    waves: FromChain | None = None
    is_damaged = False
    try:
        decision = SnapshotDecision.read(request["decision"])
        fast, slow = LocalTier(request["fast"]), LocalTier(request["slow"])
        if request["do"] == "check":
            check_part(slow, decision, 0, Part(*request["part"]), to_its_end=True)
            return {}
        catalog = Catalog([fast, slow])
        try:
            opened = open_links(catalog, [Link(*link) for link in request["links"]])
        except FormatError:
            is_damaged = True
            raise
        with closing(opened) as chain, Workers(request["threads"], "penstock-drain") as workers:
            rate = request["bytes_per_second"]
            cap = None if rate is None else Cap(slow.name, rate)
            draft = slow.begin(folder_of(decision.step), decision.uid, join=True)
            waves = FromChain(chain, threading.Event())
            encoding = EncodingConfig("complete", 1, request["codec"], request["kept_mantissa_bits"])
            made = write_staged(draft, decision, 0, encoding, waves, catalog, workers, cap=cap)
    except (PenstockError, OSError) as error:
        kind = FormatError if isinstance(error, FormatError) else DataError
        is_damaged = is_damaged or (waves is not None and waves.is_damaged)
        return {"failed": kind.__name__, "message": str(error), "is_damaged": is_damaged}
    return {"written": made.write()}
