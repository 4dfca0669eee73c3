"""The ranks of a job agree: how they write one snapshot together.

One exchange serves every need: each rank contributes a value, rank 0 decides, all hear the decision.

    rank 1..n-1   function() -> value ──▶┐                        ┌──▶ answer
    rank 0        function() -> value ───┴─▶ decide(values) ──────┴──▶ answer

What fails anywhere, in `function` or in `decide`, is raised everywhere and names the rank. A rank that does not come
is named by rank 0, and that too is raised everywhere. Not the collectives of a training framework, because those
do not say who was missing, and leave the group unusable: here the ranks can continue afterwards.

Messages are JSON, and bytes where a value is, never pickle.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import penstock.errors
from penstock.errors import PenstockError, RankError, WaitTimeout, reason_of
from penstock.ranks.transport import (
    NAMED_RANKS,
    TIMEOUT_SECONDS,
    NoTransport,
    RankTransport,
    named_ranks,
    pause_seconds,
)
from penstock.ranks.transport_of_job import job_of_this_process, transport_of_this_job
from penstock.validate import check_wait

#: While a rank works, it says so this many times within a time-out.
SIGNS_PER_TIMEOUT = 6

#: Between a message's JSON, which has no line ends, and a value of bytes.
_BYTES_FOLLOW = b"\n"


class Ranks:
    """The ranks of one job, for one purpose: every rank makes its own, in the same order, and makes the same calls.

    transport: how messages travel; nobody else sends any by it.
    timeout_seconds: how long a rank may give no sign of life, from when rank 0 waits for it, before it is named.

    One thread at a time uses it, any thread. Exchanges do not nest.
    """

    def __init__(self, transport: RankTransport, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        check_wait("timeout_seconds", timeout_seconds)
        self.rank = transport.rank
        self.size = transport.size
        self.transport = transport
        self._timeout_seconds = timeout_seconds
        self._exchanges = 0  # how many have begun: the number of the current one
        self._early: dict[
            int, list[dict[str, Any]]
        ] = {}  # messages of exchanges that this rank has not begun
        self._in_use = threading.Lock()  # held for an exchange

    @property
    def others(self) -> list[int]:
        """Return the ranks other than this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Return every rank's value on every rank, in order of ranks. Raises: as `gather_then_decide`."""
        return self.gather_then_decide(what, _Given(value))  # type: ignore[no-any-return]

    def on_rank_zero(self, what: str, function: Callable[[], Any]) -> Any:
        """Return on every rank what the function returns on rank 0, which alone calls it.

        So rank 0 hands bytes to the others: `data = ranks.on_rank_zero("the listing of photos", lambda: listing())`
        on every rank, where `listing` returns bytes. The others wait for as long as it takes, for meanwhile rank 0 is
        heard of. Bytes travel as they are, to one rank after the other.
        Raises: as `gather_then_decide`.
        """
        if self.size == 1:
            return self.gather_then_decide(what, function)[0]
        return self.gather_then_decide(what, _Given(None), lambda _: function())

    def gather_then_decide(
        self, what: str, function: Callable[[], Any], decide: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """Call a function on every rank, then `decide` on rank 0, and return its answer on every rank.

        what: for messages, such as "the commit of step 300"; equal on all ranks.
        function: this rank's part; it may take as long as it likes, for meanwhile the rank is heard of.
        decide: takes what the functions returned, in order of ranks. None: the answer is that list.
        Values and answers travel as JSON: a tuple arrives as a list, and what has a `write` as what that returns. A
            value or an answer may be bytes instead. With one rank nothing travels.

        Raises: on every rank, if any rank's function, or `decide`, raised: an error of the same kind where that is a
            PenstockError, else RankError; it names the rank. Where it happened, the original is its cause, and with
            one rank it is raised as it is. WaitTimeout on every rank, naming those which gave no sign of life for
            `timeout_seconds`. RankError on every rank if they are not at the same `what`.
        """
        if not self._in_use.acquire(blocking=False):
            raise AssertionError(
                f"{what} began while another exchange of the same ranks went on; exchanges do not nest"
            )
        try:
            if self.size == 1:
                values = [function()]
                return values if decide is None else decide(values)
            self._exchanges += 1
            if self.rank == 0:
                return self._lead(what, function, decide)
            return self._follow(what, function)
        finally:
            self._in_use.release()

    def leave(self, error: BaseException, what: str = "") -> None:
        """Take part in the next exchange with a failure, and wait for nobody: the others hear of it when they come.

        error: with which this rank leaves what all do together. Nothing is done while an exchange is under way.
        what: that exchange, where it is known; the others raise an error of the same kind then.
        """
        if self.size == 1 or not self._in_use.acquire(blocking=False):
            return
        try:
            self._exchanges += 1
            text = f"rank {self.rank} of {self.size} left the others: {type(error).__name__}: {error}"
            message = (
                self._failure(what, error) if what else {"what": "", "failed": "RankError", "text": text}
            )
            with contextlib.suppress(RankError, WaitTimeout):
                if self.rank == 0:
                    self._send_all(message)
                else:
                    self.transport.send(0, self._sealed(message))
        finally:
            self._in_use.release()

    # -- Rank 0 --

    def _lead(self, what: str, function: Callable[[], Any], decide: Callable[[list[Any]], Any] | None) -> Any:
        cause: Exception | None = None
        try:
            own, cause = self._outcome(what, function, self.others)
            messages = {0: own} | self._collect(what)
            failure = _failure_among(messages, what, self.size)
            if failure is None:
                values = [messages[rank]["value"] for rank in range(self.size)]
                choose = _Given(values) if decide is None else functools.partial(decide, values)
                answer, cause = self._outcome(what, choose, self.others)
                failure = _failure_among({0: answer}, what, self.size)
            if failure is not None:
                answer = failure
        except WaitTimeout as error:
            answer = {"failed": "WaitTimeout", "text": str(error)}
        except BaseException as error:  # such as KeyboardInterrupt: this rank leaves, and says so
            with contextlib.suppress(RankError):
                self._send_all({"failed": "RankError", "text": _left(0, self.size, what, error)})
            raise
        self._send_all(answer)
        return _opened(answer, cause)

    def _collect(self, what: str) -> dict[int, dict[str, Any]]:
        """Return what each other rank contributed. Raises: WaitTimeout naming those of which nothing was heard."""
        began = time.monotonic()
        last_sign = dict.fromkeys(self.others, began)
        next_own_sign = began
        arrived: dict[int, dict[str, Any]] = {}
        while True:
            for rank in self.others:
                for message in self._messages_from(rank):
                    last_sign[rank] = time.monotonic()
                    if "sign" not in message:
                        arrived[rank] = message  # a later one tells that the rank gave up waiting
            if len(arrived) == self.size - 1:
                return arrived
            now = time.monotonic()
            missing = [
                rank
                for rank in self.others
                if rank not in arrived and now - last_sign[rank] > self._timeout_seconds
            ]
            if missing:
                raise WaitTimeout(self._did_not_arrive(missing, what))
            if now >= next_own_sign:
                self._send_all({"sign": True})
                next_own_sign = now + self._timeout_seconds / SIGNS_PER_TIMEOUT
            time.sleep(pause_seconds(now - began))

    def _send_all(self, message: dict[str, Any]) -> None:
        data, sign = self._sealed(message), self._sealed({"sign": True})
        next_sign = time.monotonic() + self._timeout_seconds / SIGNS_PER_TIMEOUT
        for rank in self.others:
            with contextlib.suppress(WaitTimeout):  # it is gone; the others must hear nevertheless
                self.transport.send(rank, data)
            if time.monotonic() > next_sign:  # a long message is under way to many ranks
                for waiting in range(rank + 1, self.size):
                    self.transport.send(waiting, sign)
                next_sign = time.monotonic() + self._timeout_seconds / SIGNS_PER_TIMEOUT

    # -- The others --

    def _follow(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            own, cause = self._outcome(what, function, [0])
        except BaseException as error:
            with contextlib.suppress(RankError, WaitTimeout):
                left = _left(self.rank, self.size, what, error)
                self.transport.send(0, self._sealed({"failed": "RankError", "text": left}))
            raise
        self.transport.send(0, self._sealed({"what": what} | own))
        began = last_sign = time.monotonic()
        while True:
            for message in self._messages_from(0):
                last_sign = time.monotonic()
                if "sign" not in message:
                    return _opened(message, cause)
            now = time.monotonic()
            if now - last_sign > self._timeout_seconds:
                text = self._did_not_arrive([0], what)
                self.transport.send(0, self._sealed({"what": what, "failed": "WaitTimeout", "text": text}))
                raise WaitTimeout(text)
            time.sleep(pause_seconds(now - began))

    # -- Both --

    def _outcome(
        self, what: str, function: Callable[[], Any], waiting: Sequence[int]
    ) -> tuple[dict[str, Any], Exception | None]:
        """Return what a function returned or raised, as a message, and what it raised.

        waiting: the ranks that this one meanwhile tells that it is alive.
        """
        try:
            with contextlib.nullcontext() if isinstance(function, _Given) else self._heard_of(waiting):
                value = function()
                if not isinstance(value, bytes):
                    value = json.loads(json.dumps(value, default=_written))
                return {"what": what, "value": value}, None
        except Exception as error:
            return self._failure(what, error), error

    def _failure(self, what: str, error: BaseException) -> dict[str, Any]:
        """Return the message that tells of an error of this rank."""
        text = f"rank {self.rank} of {self.size}, {what}: {reason_of(error)}"
        # Of a kind that the module which raised it has for itself, the one of all modules.
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == PenstockError.__module__)
        return {"what": what, "failed": next(kinds, "RankError"), "text": text}

    def _messages_from(self, sender: int) -> list[dict[str, Any]]:
        """Return the messages of the current exchange that have come; those of earlier ones came too late."""
        messages = self._early.pop(sender, [])
        while (data := self.transport.receive(sender)) is not None:
            head, is_of_bytes, value = data.partition(_BYTES_FOLLOW)
            messages.append(json.loads(head) | ({"value": value} if is_of_bytes else {}))
        if early := [message for message in messages if message["exchange"] > self._exchanges]:
            self._early[sender] = early
        return [message for message in messages if message["exchange"] == self._exchanges]

    def _sealed(self, message: dict[str, Any]) -> bytes:
        if isinstance(value := message.get("value"), bytes):
            return self._sealed(message | {"value": None}) + _BYTES_FOLLOW + value
        return json.dumps({"exchange": self._exchanges} | message).encode()

    @contextlib.contextmanager
    def _heard_of(self, by: Sequence[int]) -> Iterator[None]:
        """Tell ranks time and again that this one is alive, for as long as the block takes."""
        done = threading.Event()
        message = self._sealed({"sign": True})

        def tell() -> None:
            while not done.wait(self._timeout_seconds / SIGNS_PER_TIMEOUT):
                for rank in by:
                    with contextlib.suppress(WaitTimeout, RankError):  # the exchange itself will say so
                        self.transport.send(rank, message)

        thread = threading.Thread(target=tell, name="penstock-ranks-sign", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _did_not_arrive(self, ranks: Sequence[int], what: str) -> str:
        return (
            f"{named_ranks(ranks)} of {self.size} did not arrive at {what} within {self._timeout_seconds:g} s; the log "
            "there may say whether it ended or what it waits for; if one rank should work by itself, give ranks=alone"
        )


def raise_own_error(exchange: Callable[[Callable[[], Any]], Any], function: Callable[[], Any]) -> Any:
    """Return what an exchange with this rank's function returns. Where that function raised, its error comes as it is.

    >>> raise_own_error(lambda part: alone().gather_then_decide("a sum", part, sum), lambda: 3)
    3
    """
    own: list[Exception] = []

    def part() -> Any:
        try:
            return function()
        except Exception as error:
            own.append(error)
            raise

    try:
        return exchange(part)
    except PenstockError:
        if not own:
            raise
    raise own.pop()


def alone() -> Ranks:
    """Return this process as a job of one rank: give it as ranks= where each process works for itself."""
    return Ranks(NoTransport())


def ranks_of_this_job(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
    """Return the ranks of the job that this process is part of; every rank calls this, in the same order.

    Raises: ConfigError as `transport_of_this_job`.
    """
    return Ranks(transport_of_this_job(timeout_seconds=timeout_seconds), timeout_seconds=timeout_seconds)


def shared_ranks() -> Ranks:
    """Return the ranks of the job that this process is part of, the same object as long as it is the same job.

    For exchanges of which there are few, all in one thread: they cost no connections of their own. Every rank calls
    this, in the same order.
    Raises: ConfigError as `transport_of_this_job`.
    """
    global _shared
    job = job_of_this_process()
    if _shared is None or _shared[0] != os.getpid() or _shared[1] is not job.carrier or not job.kind:
        _shared = os.getpid(), job.carrier, ranks_of_this_job()
    return _shared[2]


#: The process that made them, what their messages travel by, and the ranks.
_shared: tuple[int, Any, Ranks] | None = None


# -- Messages ----------------------------------------------------------------------------------------------


def _written(value: Any) -> Any:
    if hasattr(value, "write"):
        return value.write()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


@dataclass(frozen=True, slots=True)
class _Given:
    """A function that has its value: it takes no time, so nobody needs a sign meanwhile."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _opened(answer: dict[str, Any], cause: Exception | None) -> Any:
    """Return what an answer holds. Raises: what it tells of."""
    if "failed" not in answer:
        return answer["value"]
    kind = getattr(penstock.errors, answer["failed"], RankError)
    raise kind(answer["text"]) from cause


def _failure_among(messages: dict[int, dict[str, Any]], what: str, size: int) -> dict[str, Any] | None:
    """Return the answer that tells of all failures; None if there was none and all ranks were at the same place."""
    failed = [rank for rank in sorted(messages) if "failed" in messages[rank]]
    if failed:
        texts = [messages[rank]["text"] for rank in failed[:NAMED_RANKS]]
        if len(failed) > NAMED_RANKS:
            texts.append(f"and {len(failed) - NAMED_RANKS} more ranks")
        return {"failed": messages[failed[0]]["failed"], "text": "; ".join(texts)}
    elsewhere = [rank for rank in sorted(messages) if messages[rank]["what"] != what]
    if elsewhere:
        text = (
            f"the ranks are not at the same place: rank 0 of {size} is at {what}, {named_ranks(elsewhere)} at "
            f"{messages[elsewhere[0]]['what']}; every rank must make the same calls in the same order"
        )
        return {"failed": "RankError", "text": text}
    return None


def _left(rank: int, size: int, what: str, error: BaseException) -> str:
    return f"rank {rank} of {size} left {what}: {reason_of(error)}"
