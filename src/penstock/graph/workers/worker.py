"""A worker: it keeps the state of sessions, runs their parts, and sends other workers what they wait for.

    client    hello, open, part, run, abort, state, load, close, ping, end    -> an answer to each but abort, close, end
    worker    values: outputs of a node, for a step of a session

A worker that cannot send to another one what a step needs, or whose connection to it is cut, answers `failed`.
One thread has the connections, another those to workers of this host; each step has one while it is under way, which
sends, and receives from workers of this host while it waits. A session ends with `close`, or when its client says
nothing for long.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from penstock.errors import ConfigError, PenstockError
from penstock.graph.errors import (
    CancelledError,
    CorruptError,
    GraphError,
    UnsupportedError,
    WorkerLostError,
)
from penstock.graph.model.graph import Graph
from penstock.graph.run.session import Session
from penstock.graph.run.statistics import Statistics
from penstock.graph.run.timeline import Lane, name_of
from penstock.graph.state.resources import Resources
from penstock.graph.workers.access import versions_here
from penstock.graph.workers.host import HostLink
from penstock.graph.workers.lanes import StepRecorder
from penstock.graph.workers.link import CLIENT, Link, key_of, offers_of
from penstock.graph.workers.mail import Mail, Values
from penstock.graph.workers.nodes import received_nodes
from penstock.graph.workers.wire import (
    MOST_PART_BYTES,
    ValuesPacker,
    halved,
    packed,
    unpacked,
    unpacked_values,
)
from penstock.heap import give_back_memory
from penstock.ranks.carrier_zmq import ZmqCarrier
from penstock.ranks.reaching import in_words, look_at

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_mpi import MpiCarrier

T = TypeVar("T")

#: A session whose client says nothing for so long is over.
FORGOTTEN_SECONDS = 60.0
#: Larger messages do not go by MPI, whose carrier takes no longer ones.
MOST_MPI_BYTES = 1 << 29
_TICK_SECONDS = 5.0
#: For so long at least a connection is cut before a client hears of it: whose worker has ended, it finds out itself.
_CUT_SECONDS = 0.25
#: Steps at once, of all sessions; more are refused. Threads for all else.
_MOST_STEPS, _OTHER_THREADS = 512, 16
#: Products of a round, rounds in a row that find none that is a tenth shorter, and the pause after each.
_REFERENCE_SIZE, _REFERENCE_TIMES, _REFERENCE_ROUNDS, _REFERENCE_PAUSE_SECONDS = 256, 5, 4, 5e-3
#: Other programs likely hold up a product that takes longer, at 30 GFLOP/s; and how long one looks for a shorter one.
_REFERENCE_LIKELY_SECONDS, _REFERENCE_MOST_SECONDS = 1e-3, 2.0


class Worker:
    """Serves the clients of a cluster as one task of it.

    task: its name, such as "/job:worker/task:0". secret: of the cluster, 32 bytes. interface, port: where it listens;
    port 0 is a free one, and `address` tells. functions, batches: what Call and NextBatch nodes on it name.
    slowness: makes each kernel take so many times as long, to try how a placement copes.
    Raises: ConfigError where it cannot listen.
    """

    def __init__(
        self,
        task: str,
        secret: bytes,
        *,
        interface: str = "127.0.0.1",
        port: int = 0,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        batches: Mapping[str, Iterable[Any] | Callable[[], Iterable[Any]]] | None = None,
        slowness: float = 1.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.task = task
        self._secret = secret
        self._brought = (functions, batches)
        self._report = report
        self._slowness = slowness
        self._reference_seconds = slowness * _reference_seconds()
        self._sessions: dict[str, _Hosted] = {}
        #: When any client said something.
        self._heard = time.monotonic()
        self._is_over = threading.Event()
        carrier = ZmqCarrier(interface, MOST_PART_BYTES, keys=key_of(secret, task), port=port)
        carrier.admits_later = True  # a worker, when a client says which there are
        carrier.admit(key_of(secret, "").public, CLIENT)
        self.address = carrier.offer["address"]
        self._step_threads = ThreadPoolExecutor(_MOST_STEPS, thread_name_prefix="penstock-graph-step")
        self._free_steps = threading.Semaphore(_MOST_STEPS)
        #: Steps that wait keep nothing else from a thread.
        self._threads = ThreadPoolExecutor(_OTHER_THREADS, thread_name_prefix="penstock-graph-worker")
        #: By address, task and how long it may be silent, the number that the link has for a worker: those of clients
        #: may differ.
        self._numbers: dict[tuple[str, str, float | None], int] = {}
        #: Of an MPI job: connection and rank of each task.
        self._mpi: tuple[Link, dict[str, int]] | None = None
        self.host = HostLink(secret, self.address, self._take_parts, report=report)
        self.link = Link(
            carrier,
            self._take,
            on_tick=self._tick,
            tick_seconds=_TICK_SECONDS,
            on_cut=self._notice,
            on_wrong=self._refuse,
            posts=True,
            report=report,
        )
        self.link.start()

    def send_by(self, carrier: MpiCarrier, tasks: Sequence[str]) -> None:
        """Send workers of other hosts by MPI what they need in steps. Once, before `close`. tasks: by rank."""
        carrier.connect({rank: {"process": rank} for rank in range(len(tasks))})
        link = Link(carrier, lambda rank, who, message: self._take_values(message))
        link.start()
        self._mpi = (link, {task: rank for rank, task in enumerate(tasks)})

    def wait(self, silent_seconds: float | None = None) -> bool:
        """Return True when the worker is closed, or a client has ended it; False when no client said anything for long.

        silent_seconds: how long that is; None: as long as it takes.
        """
        self._heard = time.monotonic()
        while not self._is_over.wait(silent_seconds and min(silent_seconds, _TICK_SECONDS)):
            if silent_seconds is not None and time.monotonic() - self._heard > silent_seconds:
                return False
        return True

    def close(self) -> None:
        """End all sessions and connections."""
        for name in list(self._sessions):
            self._close(name)
        self._step_threads.shutdown()
        self._threads.shutdown()
        self.link.close()
        if self._mpi is not None:
            self._mpi[0].close()
        self.host.close()  # the last: others wake a step that listens to it
        self._is_over.set()

    # -- In the link's thread ---------------------------------------------------------------------------------

    def _take(self, number: int, who: Any, message: dict[str, Any]) -> None:
        """Act on a message: at once, or in another thread."""
        kind = message["kind"]
        if number != CLIENT:
            self._take_values(message)
            return
        self._heard = time.monotonic()
        hosted = self._sessions.get(message.get("session", ""))
        if hosted is not None:
            hosted.heard, hosted.client = self._heard, who
        answer = _ANSWERS.get(kind)
        if answer is None:
            self.link.answer(
                who, {"kind": "failed", "error": _error(CorruptError(f"no request is {kind!r:.40}"))}
            )
        elif hosted is None and kind not in ("hello", "open", "ping", "end"):
            if kind not in ("drop", "abort", "close"):
                self.link.answer(who, {"kind": "unknown", **_about(message)})
        else:
            try:
                answer(self, who, message, hosted)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                wrong = CorruptError(f"the request {kind!r} is malformed: {type(error).__name__}: {error}")
                self.link.answer(who, {"kind": "failed", **_about(message), "error": _error(wrong)})

    def _refuse(self, number: int, who: Any, error: CorruptError) -> None:
        """Tell a client that its message cannot be read: one of another version learns it by not understanding this."""
        if number == CLIENT:
            self.link.answer(who, {"kind": "failed", "error": _error(error)})

    def _take_parts(self, parts: list[Any]) -> None:
        """Act on what a worker of this host sent, in the thread of `host` or of a step. Raises: CorruptError."""
        found = unpacked_values(parts)
        if found is None:
            self._take_values(unpacked(parts))
            return
        session, step, node, values = found
        hosted = self._sessions.get(session)
        if hosted is not None:
            hosted.mail.put(step, node, values)

    def _take_values(self, message: dict[str, Any]) -> None:
        try:
            hosted = self._sessions.get(message.get("session", ""))
            if hosted is not None and message["kind"] == "asked":
                # What is sent then may be large, and this thread is for all.
                self._start(hosted.mail.asked, message["step"], message["node"], message["by"])
            elif hosted is not None and message["kind"] == "values":
                values = {int(port): value for port, value in message["values"]}
                hosted.mail.put(int.from_bytes(message["step"], "little"), message["node"], values)
        except (KeyError, TypeError, ValueError):
            pass  # another worker's fault is not this one's end

    def _notice(self, numbers: set[int]) -> None:
        """Act on connections to workers that were cut, in the link's thread: messages to them may be lost."""
        for name, hosted in list(self._sessions.items()):
            for receiver in hosted.watched():
                if receiver.number in numbers:
                    self._start(self._tell_cut, name, hosted, receiver, time.monotonic() + _CUT_SECONDS)

    def _tell_cut(self, name: str, hosted: _Hosted, receiver: _Receiver, after: float) -> None:
        error = _error(hosted.unreached(receiver, "the connection was cut; now "))
        self._is_over.wait(max(after - time.monotonic(), 0.0))
        if self._sessions.get(name) is hosted:
            self.link.answer(hosted.client, {"kind": "failed", "session": name, "error": error})

    def _tick(self) -> None:
        now = time.monotonic()
        for name, hosted in list(self._sessions.items()):
            if now - hosted.heard > FORGOTTEN_SECONDS:
                self._close(name)

    def _hello(self, who: Any, message: dict[str, Any], hosted: Any) -> None:
        self.link.answer(
            who,
            {
                "kind": "hello",
                **_about(message),
                "task": self.task,
                "versions": versions_here(),
                "pid": os.getpid(),
                # Kernels run on no GPU: a node that asks for one is refused.
                "devices": [f"{self.task}/device:cpu:0"],
                "functions": list(self._brought[0] or ()),
                "batches": list(self._brought[1] or ()),
                "reference_seconds": self._reference_seconds,
                "clock": time.perf_counter(),
            },
        )

    def _ping(self, who: Any, message: dict[str, Any], hosted: Any) -> None:
        busy = hosted.busy() if hosted is not None and message["asks_busy"] else []
        self.link.answer(who, {"kind": "pong", **_about(message), "has": hosted is not None, "busy": busy})

    def _open(self, who: Any, message: dict[str, Any], hosted: Any) -> None:
        others = {task: address for task, address in message["addresses"].items() if task != self.task}
        here = list(others.values()) if message["shares_memory"] else []
        self.host.connect(here)
        receivers: dict[str, _Receiver] = {}
        for task, offer in offers_of(self._secret, others).items():
            address = others[task]
            is_watched = not (here and self.host.has(address)) and not (self._mpi and task in self._mpi[1])
            seconds = float(message["lost_seconds"]) if is_watched else None
            number = self._numbers.setdefault((address, task, seconds), len(self._numbers))
            receivers[task] = _Receiver(task, number, offer, seconds)
        self.link.admit({each.number: each.offer for each in receivers.values()})

        session, is_lossy = message["session"], message["is_lossy"]
        packers: dict[str, ValuesPacker] = {}

        def send(to: str, step: int, node: str, values: Values | None) -> None:
            if values is None:
                asked = {"kind": "asked", "session": session, "node": node, "step": step, "by": self.task}
                parts = packed(asked)
            else:
                packer = packers.get(node)
                if packer is None:
                    packer = packers[node] = ValuesPacker(session, node)
                parts = packer.packed(step, halved(values) if is_lossy else values)
            if here and self.host.send(others[to], parts):
                return
            if self._mpi is not None and to in self._mpi[1] and sum(map(len, parts)) < MOST_MPI_BYTES:
                self._mpi[0].post(self._mpi[1][to], parts)
            else:
                self.link.post(receivers[to].number, parts)

        def lend(to: str, nbytes: int) -> Any:
            return self.host.lend(others[to], nbytes) if here and not is_lossy else None

        hosted = _Hosted(self, Mail(send, lend, self.host.get_within), int(message["seed"]))
        hosted.client, hosted.receivers = who, receivers
        self._sessions[session] = hosted
        self.link.answer(who, {"kind": "opened", **_about(message)})

    def _part(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        hosted.parts[message["part"]] = self._start(hosted.make_part, message)

    def _drop(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        hosted.parts.pop(message["part"], None)

    def _run(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        hosted.mail.begin(int(message["oldest"]))
        if not self._free_steps.acquire(blocking=False):
            hosted.mail.end(int(message["step"]))
            full = UnsupportedError(
                f"{self.task} runs {_MOST_STEPS} steps, as many as a worker can at once: let one end before the next, "
                "also of those that wait for a queue"
            )
            self.link.answer(who, {"kind": "failed", **_about(message), "error": _error(full)})
            return

        recorder = StepRecorder(self.task, int(message["step"])) if message["records"] else None

        def run(message: dict[str, Any]) -> dict[str, Any]:
            try:
                return hosted.run(message, None if recorder is None else recorder.lane)
            finally:  # before the answer, after which the next may come
                self._free_steps.release()

        self._later(who, message, run, self._step_threads, recorder)

    def _abort(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        hosted.abort(int(message["step"]), message["why"])

    def _state(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        self._later(who, message, hosted.state)

    def _load(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        self._later(who, message, hosted.load)

    def _later(
        self,
        who: Any,
        message: dict[str, Any],
        act: Callable[[dict[str, Any]], dict[str, Any]],
        threads: ThreadPoolExecutor | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Answer a request with what a function gives, and what was recorded, in a thread of its own."""

        def about() -> dict[str, Any]:
            return {**_about(message), **({} if recorder is None else {"recorded": recorder.found()})}

        def answer() -> None:
            try:
                found = act(message)
                self.link.answer(who, {"kind": "done", **about(), **found})
            except Exception as error:
                # Of a session that ended here, as this worker is closing, the client hears as of a loss.
                if message["session"] in self._sessions:
                    self.link.answer(who, {"kind": "failed", **about(), "error": _error(error)})

        self._start(answer, threads=threads)

    def _start(
        self, act: Callable[..., T], *args: Any, threads: ThreadPoolExecutor | None = None
    ) -> Future[T]:
        """Call something in a thread of its own: this one is for all. threads: None: those for what is no step."""
        try:
            return (threads or self._threads).submit(act, *args)
        except RuntimeError:  # the worker is closing
            over: Future[T] = Future()
            over.set_exception(CancelledError("the worker is closing"))
            return over

    def _forget(self, who: Any, message: dict[str, Any], hosted: _Hosted) -> None:
        self._close(message["session"])

    def _end(self, who: Any, message: dict[str, Any], hosted: Any) -> None:
        self._is_over.set()

    def _close(self, name: str) -> None:
        hosted = self._sessions.pop(name, None)
        if hosted is not None:
            hosted.cancel()
            try:  # what closes batches may take long, such as a Loader's threads
                self._threads.submit(self._close_batches, hosted)
            except RuntimeError:  # the worker is closing
                self._close_batches(hosted)

    def _close_batches(self, hosted: _Hosted) -> None:
        try:
            hosted.resources.close()
        except Exception as error:  # nobody waits for it
            if self._report is not None:
                why = f"{type(error).__name__}: {error}"
                with contextlib.suppress(Exception):
                    self._report(f"{self.task}: batches of a session do not close: {why}")
        finally:
            give_back_memory()


_ANSWERS: dict[str, Callable[..., None]] = {
    "hello": Worker._hello,
    "ping": Worker._ping,
    "open": Worker._open,
    "part": Worker._part,
    "drop": Worker._drop,
    "run": Worker._run,
    "abort": Worker._abort,
    "state": Worker._state,
    "load": Worker._load,
    "close": Worker._forget,
    "end": Worker._end,
}


class _Receiver(NamedTuple):
    """A worker that this one may send to: the link's number for it, how it is reached, and how long it may be silent.

    lost_seconds: None where its connection is not watched, as what is sent goes another way.
    """

    task: str
    number: int
    offer: dict[str, str]
    lost_seconds: float | None


class _Part(NamedTuple):
    """A part of a graph: the session that runs it, and those that it sends to by connections that are watched."""

    session: Session
    watched: Sequence[_Receiver]


class _Hosted:
    """A client's session on this worker: its state, and the parts of graphs that it runs.

    client: whom to answer. receivers: the other workers, by task.
    """

    def __init__(self, worker: Worker, mail: Mail, seed: int) -> None:
        self.heard = time.monotonic()
        self.client: Any = None
        self.receivers: dict[str, _Receiver] = {}
        self._task, self._link = worker.task, worker.link
        self.parts: dict[int, Future[_Part]] = {}
        self.mail = mail
        self.resources = Resources(seed, *worker._brought)
        self.resources.mail = mail
        self._slowness = worker._slowness
        self._aborted: dict[int, str] = {}
        self._lock = threading.Lock()
        #: By step: what it ran when `busy` was asked, and since when it was seen at that.
        self._seen: dict[int, tuple[Any, float]] = {}

    def make_part(self, message: dict[str, Any]) -> _Part:
        """Return a part of the client's graph, and connect to whom it sends to: by now they all admit this worker."""
        nodes = received_nodes(message)
        tasks = {
            task
            for node in nodes
            if node.op in ("Send", "Recv") and (task := node.attr.get("to") or node.attr.get("asks"))
        }
        receivers = [each for task, each in self.receivers.items() if task in tasks]
        for each in receivers:
            self._link.connect({each.number: each.offer}, cut_seconds=each.lost_seconds)
        session = Session(
            Graph(nodes),
            resources=self.resources,
            regions=bool(message["regions"]),
            check_finite=bool(message["check_finite"]),
            slowness=self._slowness,
        )
        return _Part(session, [each for each in receivers if each.lost_seconds is not None])

    def watched(self) -> list[_Receiver]:
        """Return those that any part sends to by connections that are watched."""
        return list({each.number: each for part in self._made() for each in part.watched}.values())

    def unreached(self, receiver: _Receiver, what: str = "") -> WorkerLostError:
        """Look at the address of a worker that a message does not reach, and return the error for the client."""
        address = receiver.offer["address"]
        return WorkerLostError(
            f"{self._task} cannot reach {receiver.task} at {address}: {what}{in_words(*look_at(address))}; give "
            "for each worker an address by which the others reach it, too, and let firewalls between them pass it"
        )

    def run(self, message: dict[str, Any], lane: Lane | None) -> dict[str, Any]:
        """Run a part as a step, and return what was fetched."""
        step = int(message["step"])
        statistics = Statistics(is_warm=message["is_warm"]) if message["counts"] else None
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, step)
            if statistics is not None:
                stack.enter_context(self.mail.watched())
            session, watched = self.parts[message["part"]].result()
            for each in watched:
                if not self._link.reaches(each.number, each.lost_seconds):
                    raise self.unreached(each)
            begin, waited = time.perf_counter(), self.mail.waited_seconds
            values = session.run(
                message["fetches"],
                message["feeds"],
                message["targets"],
                statistics=statistics,
                number=step,
                lane=lane,
                # Not before: what comes between a look and the step's begin would end nothing.
                begun=partial(self._check, step, message["oldest"]),
            )
            waited = self.mail.waited_seconds - waited
        found: dict[str, Any] = {"values": values, "busy_seconds": time.perf_counter() - begin - waited}
        if statistics is not None:
            found["statistics"] = {
                "kernels": statistics.kernels,
                "seconds": statistics.seconds,
                "nbytes": statistics.nbytes,
                "received_bytes": self.mail.peak_bytes,
                "live_bytes": statistics.live_bytes[""],
            }
        return found

    def _check(self, step: int, oldest: int) -> None:
        """Raise what `abort` said of a step; forget what it said of those before the oldest one."""
        with self._lock:
            why = self._aborted.get(step)
            self._aborted = {each: text for each, text in self._aborted.items() if each >= oldest}
        if why is not None:
            raise CancelledError(why)

    def _end(self, step: int) -> None:
        self.mail.end(step)
        with self._lock:
            self._aborted.pop(step, None)

    def state(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the state of this worker."""
        return {"state": self.resources.state()}

    def load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Go on from a state."""
        self.resources.load(message["state"])
        return {}

    def abort(self, step: int, why: str) -> None:
        """End a step that another worker cannot go on with, also one that has not begun yet."""
        with self._lock:
            self._aborted[step] = why
        for session in self._sessions():
            session.cancel(step, CancelledError(why))

    def busy(self) -> list[tuple[str, float]]:
        """Return the node that each step runs, and for how many seconds at least."""
        now = time.monotonic()
        seen = {
            step.number: (at, since if known is at else now)
            for session in self._sessions()
            for step in session.steps()
            if (at := step.under_way) is not None
            for known, since in [self._seen.get(step.number, (None, now))]
        }
        self._seen = seen
        return [(name_of(at[0]), now - since) for at, since in seen.values()]

    def _made(self) -> list[_Part]:
        parts = list(self.parts.values())
        return [part.result() for part in parts if part.done() and part.exception() is None]

    def _sessions(self) -> list[Session]:
        return [part.session for part in self._made()]

    def cancel(self) -> None:
        """End the session's steps; `resources` are closed after that."""
        for session in self._sessions():
            session.close()


def brought_by(module: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a Python module has for Call and NextBatch nodes: its `functions` and `batches`.

    module: importable from the working directory, too; None: there are none. Raises: ConfigError.
    """
    if module is None:
        return {}, {}
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"the module {module!r} cannot be imported for its nodes: {error}") from error
    return getattr(found, "functions", {}), getattr(found, "batches", {})


def _reference_seconds() -> float:
    """Return how long this machine takes for one product of matrices, by which machines are compared.

    The least of several rounds: where other programs run, such as a worker that starts beside this one, all products of
    a round may take a hundred times as long, as each waits for the slowest of PyTorch's threads.
    """
    matrix = torch.ones(_REFERENCE_SIZE, _REFERENCE_SIZE)
    least, rounds, end = math.inf, 0, time.perf_counter() + _REFERENCE_MOST_SECONDS
    while rounds <= _REFERENCE_ROUNDS or (least > _REFERENCE_LIKELY_SECONDS and time.perf_counter() < end):
        before = least
        for _ in range(_REFERENCE_TIMES):
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            least = min(least, time.perf_counter() - begin)
        rounds = rounds + 1 if least >= 0.9 * before else 1
        time.sleep(_REFERENCE_PAUSE_SECONDS)
    return least


def _about(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("session", "step", "ask", "sent") if name in message}


def _error(error: BaseException) -> dict[str, str]:
    if isinstance(error, GraphError):
        return {"kind": error.kind, "text": error.text, "node": error.node, "where": error.where}
    kind = "penstock" if isinstance(error, PenstockError) else "kernel"
    return {"kind": kind, "text": f"{type(error).__name__}: {error}", "node": "", "where": ""}
