"""A process that writes what a drain copies, so that the training's own interpreter has nothing to do with it.

    training     {"chain": ..., "plan": ..., "way": ...} ──▶ a line of JSON on the process's standard input
    the process  reads the fast tier, encodes, writes and syncs a part of the draft that the training began
                 ◀── {"part": ..., "rows": ...} or {"failed": ...}, a line on its standard output

What a snapshot shall be, its commit and what goes after it stay with the training. The process ends with the drain, and
with its standard input: a training that is killed leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.checkpoint.catalog import Catalog, Link, open_way
from penstock.checkpoint.local import LocalTier
from penstock.checkpoint.manifest import Stored, folder_of, read_layout, write_layout
from penstock.checkpoint.parts import Part
from penstock.checkpoint.recipe import (
    Plan,
    Way,
    WrittenPart,
    check_part,
    opened_reference,
)
from penstock.checkpoint.staged import FromChain, write_staged
from penstock.checkpoint.throttle import CappedTier
from penstock.checkpoint.tier import Tier
from penstock.errors import DataError, FormatError, PenstockError
from penstock.flow.cpus import give_way
from penstock.flow.ordered import Workers
from penstock.trace.trace import JSON

_PROGRAM = "from penstock.checkpoint.drain_process import serve; serve()"
_LOOK_SECONDS = 0.05


class NoProcess(Exception):
    """A process of its own cannot be had here."""


class DrainProcess:
    """The process, as the training sees it. Used by one thread, which closes it."""

    def __init__(self, interrupt: threading.Event) -> None:
        """Begin. interrupt: once set, what is asked is broken off. Raises: NoProcess."""
        self._interrupt = interrupt
        if not sys.executable or getattr(sys, "frozen", False):
            raise NoProcess("this program is no Python interpreter that another could be begun with")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            raise NoProcess(str(error)) from None
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"  # noqa: PT018
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            self._answer()  # it greets first
        except BaseException as error:
            self.close()
            if isinstance(error, DataError) and not interrupt.is_set():
                raise NoProcess(str(error)) from None
            raise

    def ask(self, request: JSON, *, to_its_end: bool = False) -> Any:
        """Return what a request is answered with. to_its_end: whether no interrupt counts.

        Raises: DataError if the process ended, or if it was interrupted: it is closed then, and writes nothing more.
        """
        data = memoryview(json.dumps(request).encode() + b"\n")
        try:
            try:
                while data:
                    data = data[self._requests.write(data) :]  # a pipe takes what it has room for
            except BrokenPipeError:
                raise DataError(self._told_end()) from None
            return self._answer(to_its_end)
        except BaseException:
            self.close()
            raise

    def _answer(self, to_its_end: bool = False) -> Any:
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if self._interrupt.is_set() and not to_its_end:
                    raise DataError("a drain was broken off: the store is closed")
                if not selector.select(_LOOK_SECONDS):
                    continue
                data = os.read(self._answers.fileno(), 1 << 20)
                if not data:
                    raise DataError(self._told_end())
                line += data
        return json.loads(line)

    def _told_end(self) -> str:
        return f"the process that drains has ended, with code {self._process.wait()}"

    def close(self) -> None:
        """End the process, whatever it does; twice is harmless."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


class Apart:
    """Has snapshots drained by a process, which is begun for the first one and lives until `close`."""

    def __init__(
        self,
        fast: Path,
        slow: Path,
        way: Way,
        threads: int,
        interrupt: threading.Event,
        report: Callable[[str], None],
        bytes_per_second: float | None = None,
    ) -> None:
        """fast, slow: folders of the tiers. way: how snapshots are written. threads: that encode.

        interrupt: once set, a drain is broken off. report: is told once if no process can be had. bytes_per_second:
            that are written at most.
        """
        self._interrupt = interrupt
        self._report = report
        self._settings: dict[str, JSON] = {
            "fast": str(fast),
            "slow": str(slow),
            "codec": way.codec,
            "kept_mantissa_bits": way.kept_mantissa_bits,
            "threads": threads,
            "bytes_per_second": bytes_per_second,
        }
        self._process: DrainProcess | None = None
        self._is_refused = False

    def of(self, links: Sequence[Link], waves: FromChain) -> Elsewhere | None:
        """Return what writes a snapshot there; None if no process can be had.

        links: the copies that it is read from. waves: the same, which is told of damage.
        Raises: DataError if it is broken off.
        """
        if self._process is None and not self._is_refused:
            try:
                self._process = DrainProcess(self._interrupt)
            except NoProcess as error:
                self._is_refused = True
                self._report(f"snapshots are drained by threads of this process: {error}")
        if self._process is None:
            return None
        return Elsewhere(self._process, {**self._settings, "links": [list(link) for link in links]}, waves)

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


class Elsewhere:
    """Writes the part of one snapshot by the process."""

    def __init__(self, process: DrainProcess, settings: Mapping[str, JSON], waves: FromChain) -> None:
        self._process = process
        self._settings = settings
        self._waves = waves

    def write(self, plan: Plan) -> WrittenPart:
        """Write a part into a draft that was begun. Raises: FormatError, DataError."""
        answer = self._process.ask({"do": "write", "plan": plan.write(), **self._settings})
        self._raise_of(answer)
        stored = [Stored(read_layout(layout), 0, first) for *layout, first in answer["rows"]]
        return WrittenPart(Part(*answer["part"]), stored, answer["encode_seconds"], answer["encoded_bytes"])

    def check(self, plan: Plan, part: Part) -> None:
        """Read a committed part back, as `check_part` does. Raises: FormatError, DataError."""
        request: dict[str, JSON] = {
            "do": "check",
            "plan": plan.write(),
            "part": [part.file, part.nbytes, part.table],
        }
        # Not broken off: what is committed would pass for damaged.
        self._raise_of(self._process.ask({**request, **self._settings}, to_its_end=True))

    def _raise_of(self, answer: Any) -> None:
        if "failed" in answer:
            self._waves.is_damaged = answer["is_damaged"]
            raise (FormatError if answer["failed"] == FormatError.__name__ else DataError)(answer["message"])


# The process itself


def serve() -> None:
    """Answer requests until the training ends or kills it."""
    # Not before: where the training leaves no processor, loading what it takes would last half a minute.
    give_way()
    # A signal to all processes of a job is the training's to answer: it may still drain.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # nobody is there any more, whatever is being written

    threading.Thread(target=listen, daemon=True).start()
    answer: JSON = {"is_ready": True}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        answer = _answered(json.loads(requests.get()))


def _answered(request: Any) -> JSON:
    waves: FromChain | None = None
    try:
        plan = Plan.read(request["plan"])
        fast, slow = LocalTier(request["fast"]), LocalTier(request["slow"])
        if request["do"] == "check":
            check_part(slow, plan, 0, Part(*request["part"]), to_its_end=True)
            return {}
        catalog = Catalog([fast, slow])
        rate = request["bytes_per_second"]
        tier: Tier = slow if rate is None else CappedTier(slow, rate)
        draft = tier.begin(folder_of(plan.step), plan.uid, join=True)
        with (
            closing(open_way(catalog, [Link(*link) for link in request["links"]])) as chain,
            Workers(request["threads"], "penstock-drain") as workers,
            opened_reference(catalog, plan, None, ()) as references,
        ):
            waves = FromChain(chain, threading.Event())
            way = Way("complete", 1, request["codec"], request["kept_mantissa_bits"])
            nbytes = sum(stored.layout.nbytes for stored in chain.manifest.tensors)
            made = write_staged(draft, plan, 0, way, waves, nbytes, references, workers)
    except (PenstockError, OSError) as error:
        kind = FormatError if isinstance(error, FormatError) else DataError
        is_damaged = waves is not None and waves.is_damaged
        return {"failed": kind.__name__, "message": str(error), "is_damaged": is_damaged}
    return {
        "part": [made.part.file, made.part.nbytes, made.part.table],
        "rows": [[*write_layout(one.layout), one.first_block] for one in made.stored],
        "encode_seconds": made.encode_seconds,
        "encoded_bytes": made.encoded_bytes,
    }
