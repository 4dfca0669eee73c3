"""Requests to the workers of a session: each is answered by all, or ends by an error that names who was lost."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import PenstockError, WaitTimeout
from penstock.graph import errors
from penstock.graph.errors import (
    CancelledError,
    CorruptError,
    GraphError,
    KernelError,
    MismatchError,
    WorkerLostError,
)
from penstock.graph.model.graph import Graph
from penstock.graph.workers.access import check_versions
from penstock.graph.workers.config import SessionConfig
from penstock.graph.workers.link import Link, key_of, offers_of
from penstock.graph.workers.reaching import look_for, resolved
from penstock.graph.workers.wire import MOST_PART_BYTES, packed
from penstock.policy.graph_silence import Silence
from penstock.ranks.carrier_zmq import ZmqCarrier
from penstock.ranks.reaching import At, look_at_all
from penstock.units import format_names

#: How long workers may take to answer at all when a session begins; and after how long, and how long before the end of
#: that, the session looks why they do not.
HELLO_SECONDS, _LOOK_AFTER_SECONDS = 20.0, 1.0
#: Time between two messages that keep a session: workers end one whose client says nothing for a minute.
_PING_SECONDS = 5.0
#: Of every loss.
_GOES_ON = (
    "; the next run begins with the last saved state, or anew: go on from saves.step of an open saving()"
)


class Peer:
    """What the client knows of a worker.

    is_here: between its first answer and its loss. reached_at: its address, without a name that would be looked up.
    slowness: how many times as long as usual it takes. brought: see `place_graph`.
    """

    def __init__(self) -> None:
        self.pid, self.reached_at = 0, ""
        self.is_here = False
        self.devices: list[str] = []
        self.brought: set[tuple[str, str]] = set()
        self.reference_seconds = self.clock_offset_seconds = 0.0
        self.slowness = 1.0

    def take(self, answer: Mapping[str, Any], asked: float) -> None:
        """Take what it answered to a greeting. asked: when, by `time.perf_counter`."""
        if self.pid != answer["pid"]:  # it measured its reference anew
            self.slowness = 1.0
        self.pid, self.devices = int(answer["pid"]), list(answer["devices"])
        self.brought = {
            *(("Call", name) for name in answer["functions"]),
            *(("NextBatch", name) for name in answer["batches"]),
        }
        self.reference_seconds = float(answer["reference_seconds"])
        # Of one host, all have one clock; of others, it is known as far as the greeting took.
        now, clock = time.perf_counter(), float(answer["clock"])
        self.clock_offset_seconds = 0.0 if asked <= clock <= now else (asked + now) / 2 - clock


class Requests:
    """Sends requests to the workers of a session, and gives up those that end, stop or lag.

    Any thread asks; answers are taken, and losses noticed, in the link's thread.

    peers: the workers, by task, as they answered `greet`. graph: of the session, for where a node was added.
    """

    def __init__(
        self,
        graph: Graph,
        addresses: Mapping[str, str],
        secret: bytes,
        config: SessionConfig,
        report: Callable[[str], None] | None,
    ) -> None:
        self._graph, self._addresses, self._secret = graph, addresses, secret
        self._config, self._report = config, report
        self._tasks = list(addresses)
        self.peers = {task: Peer() for task in self._tasks}
        self._silence = Silence(self._tasks, config.lag_seconds)
        self._name = ""
        #: Whether all workers have answered that they opened the session of this name.
        self._is_opened = False
        self._lock = threading.Lock()
        self._asks: dict[int, Ask] = {}
        self._next = 0
        self._lost: WorkerLostError | None = None
        #: Whether it was raised to the caller.
        self._is_raised = False
        self._is_closed = False
        self._link = Link(
            ZmqCarrier(None, MOST_PART_BYTES, keys=key_of(secret, "")),
            self._take,
            on_tick=self._ping,
            tick_seconds=min(
                [_PING_SECONDS, *(each / 4 for each in (config.lag_seconds, config.node_seconds) if each)]
            ),
            on_cut=self._notice,
            on_wrong=self._refuse,
            report=report,
        )
        self._link.start()

    # -- Beginning -------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Greet all workers; those that live end what they have of an earlier `open`.

        Raises: WorkerLostError; VersionError; MismatchError for workers of another secret or name.
        """
        before, self._name, self._is_opened = self._name, "", False
        if before:
            for task in self._tasks:
                self.tell(task, {"kind": "close", "session": before})
        offers = dict(enumerate(offers_of(self._secret, self._addresses).values()))
        self._link.connect(offers, cut_seconds=self._config.lost_seconds)
        began = time.perf_counter()
        for task, answer in self._greetings().items():
            if answer.get("task") != task:
                raise MismatchError(
                    f"the worker at {self._addresses[task]} is {answer.get('task')!r:.80}, and {task!r} was asked for"
                )
            check_versions(task, answer.get("versions", {}))
            peer = self.peers[task]
            peer.reached_at = resolved(self._addresses[task])
            peer.take(answer, began)
            # It answered up to HELLO_SECONDS ago, and was not asked since.
            self._silence.hear(task, time.monotonic())
            peer.is_here = True

    def _greetings(self) -> dict[str, dict[str, Any]]:
        """Return what each worker answers to a greeting; they may start while it waits.

        Raises: WorkerLostError; MismatchError for a worker of another secret or name, as soon as that is seen.
        """
        begun = time.monotonic()
        greeted = self.ask({task: {"kind": "hello"} for task in self._tasks})
        end, early = begun + HELLO_SECONDS, min(_LOOK_AFTER_SECONDS, HELLO_SECONDS / 2)
        try:
            for is_first, until in ((True, begun + early), (False, end - early)):
                try:
                    return greeted.wait(until - time.monotonic())
                except WaitTimeout:
                    look = look_for(greeted.pending(), self._addresses, self._secret, until + early)
                    if look.is_final:
                        raise MismatchError(look.why) from None
                    if is_first and self._report is not None:
                        self._report(
                            f"the session waits up to {HELLO_SECONDS:.0f} s for its workers: {look.why}"
                        )
            return greeted.wait(end - time.monotonic())
        except WaitTimeout:
            raise WorkerLostError(
                f"no answer in {HELLO_SECONDS:.0f} s: {look.why}; start each worker, and give, for each name, the "
                "address that its own worker prints"
            ) from None
        finally:
            self.forget(greeted.number)

    def open(self) -> None:
        """Open a session on each worker, anew if one was lost.

        Raises: WorkerLostError, also for a worker that was lost since it was greeted.
        """
        self._name = uuid.uuid4().hex
        opening = {
            "kind": "open",
            "addresses": self._addresses,
            "seed": self._config.seed,
            "lost_seconds": self._config.lost_seconds,
            "shares_memory": self._config.shares_memory,
            "is_lossy": self._config.is_lossy,
        }
        self.ask(dict.fromkeys(self._tasks, opening)).wait(HELLO_SECONDS)
        self._is_opened = True
        with self._lock:
            if self._lost is not None and not all(peer.is_here for peer in self.peers.values()):
                self._is_raised = True
                raise self._lost
            self._lost = None

    @property
    def is_lost(self) -> bool:
        """Return whether a worker was lost since the session was opened."""
        return self._lost is not None

    def recover(self, begin_anew: Callable[[], None], *, is_asked: bool = False) -> None:
        """Call what begins anew, if a worker was lost; where that fails, the next call tries again.

        is_asked: whether to go back to a save is what the caller asks for.
        Raises: WorkerLostError if that is not asked for and the loss was not raised yet: nobody goes back unknowingly.
        """
        with self._lock:
            if (lost := self._lost) is None:
                return
            if not (is_asked or self._is_raised):
                self._is_raised = True
                raise lost
        try:
            begin_anew()
        except BaseException:
            with self._lock:
                self._lost = self._lost or lost
            raise

    # -- Asking ----------------------------------------------------------------------------------------------

    def tell(self, task: str, message: Mapping[str, Any]) -> None:
        """Send a worker what it does not answer."""
        self._send(task, packed({"session": self._name, **message}))

    def _send(self, task: str, parts: list[Any]) -> None:
        nbytes = self._link.ask(self._tasks.index(task), parts)
        self._silence.send(task, nbytes, time.monotonic())

    def ask(
        self, messages: Mapping[str, Mapping[str, Any]], holds: Mapping[str, list[str]] | None = None
    ) -> Ask:
        """Send each worker a request, or none if one cannot be sent; what returns collects the answers.

        holds: nodes that each has to run for it; None: for a request of a session that begins.
        Raises: WorkerLostError if one is lost, unless `holds` is None.
        """
        with self._lock:
            if self._lost is not None and holds is not None:
                self._is_raised = True
                raise self._lost
            self._next += 1
            number = self._next
            ask = self._asks[number] = Ask(self, number, list(messages), dict(holds or {}))
            oldest = min(self._asks)
        about = {"session": self._name, "ask": number, "step": number, "oldest": oldest}
        try:
            made = {task: packed({**message, **about}) for task, message in messages.items()}
        except BaseException:
            self.forget(number)
            raise
        for task, parts in made.items():
            self._send(task, parts)
        return ask

    def abort(self, ask: Ask, why: str) -> None:
        """End what is still under way of a step, and wait until the workers that live have ended it.

        Not of a session that is closed, which ends on all workers.
        """
        if self._is_closed:
            return
        for task in ask.pending():
            self.tell(task, {"kind": "abort", "step": ask.number, "why": f"the step was ended: {why}"})
        ask.settle(self._config.lost_seconds)

    def note_raised(self, error: PenstockError) -> None:
        """Remember an error that was raised to the caller, who may run the next step after a loss."""
        self._is_raised = self._is_raised or isinstance(error, WorkerLostError)

    def forget(self, number: int) -> None:
        """Drop a request that is over."""
        with self._lock:
            self._asks.pop(number, None)

    def check_open(self) -> None:
        """Raise CancelledError after `close`."""
        if self._is_closed:
            raise CancelledError("the session is closed")

    def close(self) -> None:
        """End the session on all workers: requests that wait raise CancelledError. Twice is harmless."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            asks = list(self._asks.values())
        for ask in asks:
            ask.fail(CancelledError("the session was closed while this run was under way"))
        for task in self._tasks:
            self.tell(task, {"kind": "close"})
        self._link.close()

    # -- In the link's thread --------------------------------------------------------------------------------

    def _take(self, number: int, who: Any, message: dict[str, Any]) -> None:
        """Act on an answer."""
        task = self._tasks[number]
        peer = self.peers[task]
        self._silence.hear(task, time.monotonic(), message.get("sent", -math.inf))
        kind = message["kind"]
        if kind in ("pong", "unknown"):
            # What answers an earlier session was on its way while the worker was lost; and a ping of this one may
            # reach a worker before the message that opens it.
            is_of_this = self._name and message.get("session") == self._name
            if is_of_this and self._is_opened and peer.is_here and not message.get("has"):
                self._lose(task, "was started again, or forgot this session")
            elif is_of_this and peer.is_here and (most_seconds := self._config.node_seconds) is not None:
                node, seconds = max(message["busy"], key=lambda each: each[1], default=("", 0.0))
                if seconds >= most_seconds:
                    self._lose(
                        task, f"lags: {node!r} runs for {seconds:.1f} s; node_seconds is {most_seconds:g}"
                    )
            return
        is_lost = kind == "failed" and message["error"]["kind"] == WorkerLostError.kind
        if is_lost and self._name and message.get("session") == self._name:
            self._lose_link(message["error"]["text"])
        with self._lock:
            ask = self._asks.get(message.get("ask", -1))
        if ask is not None:
            ask.take(task, message)

    def _ping(self) -> None:
        """Tell all workers that this client lives; they answer whether they know its session."""
        # Before their silence is looked at: `greet` notes first that a worker was heard, and then that it is here.
        here = [task for task, peer in self.peers.items() if peer.is_here]
        silent = self._silence.too_long(time.monotonic())
        self._look_and_lose(
            {task: silent[task] for task in here if task in silent},
            "lags: Python there answers nothing for {:.1f} s, as in one long call; lag_seconds is "
            f"{self._config.lag_seconds}",
        )
        for task in here:
            if task not in silent:
                asks_busy = self._config.node_seconds is not None
                ping = {"kind": "ping", "session": self._name, "asks_busy": asks_busy}
                ping["sent"] = time.monotonic()
                self._link.ask(self._tasks.index(task), packed(ping))

    def _notice(self, numbers: set[int]) -> None:
        """Act on connections that were cut."""
        here = [
            task for number, task in enumerate(self._tasks) if number in numbers and self.peers[task].is_here
        ]
        self._look_and_lose(
            dict.fromkeys(here, self._config.lost_seconds),
            "was cut off: a worker listens at its address; it was started again, or the network failed",
        )

    def _look_and_lose(self, silent: Mapping[str, float], is_there: str) -> None:
        """Give workers up that do not answer, each with what is at its address.

        silent: by task, for how many seconds. is_there: why, in a format for these, where a worker still is.
        """
        looks = look_at_all([self.peers[task].reached_at for task in silent])
        for (task, seconds), (at, more) in zip(silent.items(), looks, strict=True):
            says_nothing = f"did not answer for {seconds:.1f} s"
            why = {
                At.NOBODY: "has ended: nobody listens at its address",
                At.UNREACHED: f"{says_nothing}, and its address cannot be reached ({more})",
                At.SILENT: f"{says_nothing}: its process is there, and stopped, or hangs",
                At.OTHER: "has ended, or cannot be reached: what listens at its address is no worker",
                At.THERE: is_there.format(seconds),
            }
            self._lose(task, why[at])

    def _refuse(self, number: int, who: Any, error: CorruptError) -> None:
        """Act on a message that cannot be read: nobody would answer for it."""
        why = f"sent what cannot be read: {error}; the same version of Penstock has to be on each machine"
        self._lose(self._tasks[number], why)

    def _lose(self, task: str, why: str) -> None:
        with self._lock:
            self.peers[task].is_here = False
            asks = list(self._asks.values())
            self._lost, self._is_raised = self._lost_error(task, why, []), False
        for ask in asks:
            held = ask.holds.get(task, [])
            ask.fail(self._lost_error(task, why, held), gone=task)

    def _lose_link(self, why: str) -> None:
        """End all requests where a worker cannot reach another one. Both may live."""
        error = WorkerLostError(why + _GOES_ON)
        with self._lock:
            if self._lost is not None:  # of a link, both ends tell
                return
            asks = list(self._asks.values())
            self._lost, self._is_raised = error, False
        for ask in asks:
            ask.fail(error)

    def _lost_error(self, task: str, why: str, held: Sequence[str]) -> WorkerLostError:
        of_step = f"; the step waits for {format_names(map(repr, held))} on it" if held else ""
        node = held[0] if held else ""
        return WorkerLostError(
            f"{task} (process {self.peers[task].pid}, {self._addresses[task]}) {why}{of_step}{_GOES_ON}",
            node=node,
            where=self._graph.nodes[node].where if node else "",
        )


class Ask:
    """A request to some workers, and their answers.

    holds: what each has to run for it. recorded: spans of those that answered, also that they failed; None of those
    that refused it.
    """

    def __init__(
        self, requests: Requests, number: int, tasks: list[str], holds: dict[str, list[str]]
    ) -> None:
        self.number, self.holds = number, holds
        self.recorded: dict[str, Any] = {}
        self._requests = requests
        self._pending = dict.fromkeys(tasks)
        self._answers: dict[str, dict[str, Any]] = {}
        self._error: PenstockError | None = None
        self._changed = threading.Condition()

    def pending(self) -> list[str]:
        """Return the workers that did not answer yet."""
        with self._changed:
            return list(self._pending)

    def take(self, task: str, message: dict[str, Any]) -> None:
        """Take an answer."""
        with self._changed:
            self._pending.pop(task, None)
            self.recorded[task] = message.get("recorded")
            if message["kind"] == "failed":
                self._error = self._error or _error_of(message["error"], task)
            else:
                self._answers[task] = message
            self._changed.notify_all()

    def fail(self, error: PenstockError, gone: str | None = None) -> None:
        """End the request with an error. gone: a worker that will not answer."""
        with self._changed:
            if gone is not None:
                self._pending.pop(gone, None)
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None) -> dict[str, dict[str, Any]]:
        """Return the answer of each worker.

        Raises: the first error; WaitTimeout.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            with self._changed:
                while self._pending and self._error is None:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise WaitTimeout(f"the run took longer than its timeout: {self._unfinished()}")
                    self._changed.wait(left)
                if self._error is not None:
                    self._requests.note_raised(self._error)
                    raise self._error
                return self._answers
        finally:
            if not self._pending:
                self._requests.forget(self.number)

    def _unfinished(self) -> str:
        """Return who did not answer, with what it has to run. Under the lock."""
        held = [(task, self.holds.get(task)) for task in self._pending]
        tasks = [
            task + (f" (with {format_names(map(repr, names))})" if names else "") for task, names in held
        ]
        return f"{' and '.join(tasks)} {'has' if len(tasks) == 1 else 'have'} not finished"

    def settle(self, seconds: float) -> None:
        """Wait until all workers answered, so long at most."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._pending and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
        self._requests.forget(self.number)


_BY_KIND = {
    each.kind: each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, GraphError)
}


def _error_of(document: Mapping[str, str], task: str) -> PenstockError:
    """Return the error that a worker reported."""
    kind = _BY_KIND.get(document["kind"], KernelError)
    text = document["text"] if document["kind"] in _BY_KIND else f"on {task}: {document['text']}"
    return kind(text, node=document["node"], where=document["where"])
