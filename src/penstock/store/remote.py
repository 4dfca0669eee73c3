"""Objects at addresses, such as `s3://bucket/train/a.jpg`: read with retries, as many at once as the store rewards.

A client (`penstock.store.remote_clients`) makes one request and says what became of it. `Objects` decides when it is
made, and made again: all requests of a source share one limit, and what fails for a while is made again until it has
failed for `retry_seconds`. An object that is another than when it was listed is an error, never delivered.

Threads carry the requests, of whoever asks and of a pool that grows with the limit: decisions/0024 has why.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.policy.requests import FIRST_LIMIT, MOST_LIMIT, RequestLimit, Retrying
from penstock.queues import get_within
from penstock.store.object_store import Facts, ObjectStore, Piece, RequestError, is_address, without_secrets
from penstock.store.remote_clients import client_of, root_of
from penstock.units import format_count, format_seconds
from penstock.validate import check_wait

T = TypeVar("T")

#: For how long a request that fails is made again, unless `storage_options` says another.
RETRY_SECONDS = 900.0
#: And at most for so long where the store has never answered, as its address may be wrong.
FIRST_ANSWER_SECONDS = 120.0
#: Without a byte for so long, a request has failed.
TIMEOUT_SECONDS = 30.0
#: A thread without work ends then.
_IDLE_SECONDS = 1.0
#: Connections take one of so many of the descriptors that this process may have.
_DESCRIPTORS_SHARE = 2
#: Failures that are kept for the trace.
_KEPT_LOST = 4096


class Lost(NamedTuple):
    """An attempt that failed: when it began and when the next one did or all was given up (`time.perf_counter`)."""

    began: float
    ended: float


class Objects:
    """The objects of one source. Any thread may read; who closes it ends what waits.

    options: as `storage_options` of `penstock.open_source`.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, *, most: int = MOST_LIMIT) -> None:
        self.options = dict(options or {})
        #: Requests under way at most: each has a connection, which is a descriptor.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = most if soft < 0 else min(most, max(FIRST_LIMIT, soft // _DESCRIPTORS_SHARE))
        is_given = "retry_seconds" in self.options
        self._retry_seconds = _seconds(self.options, "retry_seconds", RETRY_SECONDS)
        self._first_answer_seconds = self._retry_seconds if is_given else FIRST_ANSWER_SECONDS
        self._timeout_seconds = _seconds(self.options, "timeout_seconds", TIMEOUT_SECONDS)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._clients: dict[str, ObjectStore] = {}
        self._clients_lock = threading.Lock()
        self._limit = RequestLimit(self.most)
        #: Protects `_limit`; told of when a request may begin.
        self._may_begin = threading.Condition(threading.Lock())
        self._closed = threading.Event()
        self._pool = _Pool()
        #: By thread, the retry that it waits for: address, number, why, since when.
        self._waiting: dict[int, tuple[str, int, str, float]] = {}
        self._lost: deque[Lost] = deque(maxlen=_KEPT_LOST)
        #: Those that have answered at all.
        self._answered: set[ObjectStore] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Objects, most=self.most), (self._all_options(),)

    def _all_options(self) -> dict[str, Any]:
        own = {"timeout_seconds": self._timeout_seconds}
        if self._first_answer_seconds == self._retry_seconds:  # else it was not given
            own["retry_seconds"] = self._retry_seconds
        return self.options | own

    # -- What is asked -------------------------------------------------------------------------------------

    def read(self, pieces: Sequence[Piece]) -> list[tuple[int, Exception]]:
        """Read pieces, all at once; return those that failed: index and error of each, ascending.

        Errors are DataError, naming the object; ClosedError once it is closed.
        """
        return [
            (index, found)
            for index, found in enumerate(self._each(self._read_one, pieces))
            if isinstance(found, Exception)
        ]

    def facts(self, addresses: Sequence[str], at: Callable[[str], None] = lambda place: None) -> list[Facts]:
        """Return what the store says of some objects. Raises: the error of the first that failed."""

        def one(address: str) -> Facts:
            at(address)
            return self._perform(address, lambda client: (client.facts(address), 0))

        found = self._each(one, addresses)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [each for each in found if isinstance(each, Facts)]

    def find(self, address: str) -> Facts | None:
        """Return what the store says of an object; None where there is none."""
        try:
            return self.facts([address])[0]
        except MissingObject:
            return None

    def walk(self, address: str, found: Callable[[int], None] = lambda count: None) -> list[Facts]:
        """Return all objects below an address. found: called with how many more there are, now and then."""

        def attempt(client: ObjectStore) -> tuple[list[Facts], int]:
            every: list[Facts] = []
            for each in client.walk(address):
                every.append(each)
                if len(every) % 1000 == 0:
                    found(1000)
            found(len(every) % 1000)
            return every, 0

        return self._complete(self._perform(address, attempt))

    def level_with_facts(self, address: str) -> list[Facts]:
        """Return the objects directly below an address, as `walk` does."""
        return self._complete(self.level(address)[0])

    def _complete(self, found: list[Facts]) -> list[Facts]:
        """Ask for what a listing does not say, as that of a web server."""
        which = [index for index, each in enumerate(found) if each.nbytes < 0]
        for index, each in zip(which, self.facts([found[index].address for index in which]), strict=True):
            found[index] = each
        return found

    def level(self, address: str) -> tuple[list[Facts], list[str]]:
        """Return the objects and folders directly below an address."""
        return self._perform(address, lambda client: (client.level(address), 0))

    def content(self, facts: Facts) -> bytes:
        """Return all of an object."""
        content = bytearray(facts.nbytes)
        for _, error in self.read([Piece(facts.address, 0, memoryview(content), facts.nbytes, facts.stamp)]):
            raise error
        return bytes(content)

    def endpoint(self, address: str) -> str:
        """Return what is asked for an address, where that is not the provider's own; else nothing."""
        client = self.options.get("client_kwargs") or {}
        found = self.options.get("endpoint_url") or (
            client.get("endpoint_url") if isinstance(client, Mapping) else ""
        )
        if not found and address.startswith("s3"):
            found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return str(found or "")

    def identity(self, address: str) -> str:
        """Return who asks for an address, for messages."""
        return self._client_of(address).identity

    # -- What it is doing ----------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """How many requests may be under way at once now."""
        return self._limit.limit

    def take_lost(self) -> list[Lost]:
        """Return the attempts that failed since the last call."""
        lost = []
        with contextlib.suppress(IndexError):
            while True:
                lost.append(self._lost.popleft())
        return lost

    def waits(self) -> str:
        """Say which retry is waited for the longest; empty where none is."""
        failing = self.failing()
        return f"waits for {failing}" if failing else ""

    def failing(self) -> str:
        """Name the retry that is waited for the longest, without the verb; empty where none is."""
        waiting = sorted(self._waiting.copy().values(), key=lambda each: each[3])
        if not waiting:
            return ""
        address, number, why, since = waiting[0]
        others = f"; {format_count(len(waiting), 'request')} failing" if len(waiting) > 1 else ""
        seconds = format_seconds(time.perf_counter() - since)
        return f"{without_secrets(address)}, retry {number} after {why}, failing for {seconds}{others}"

    def close(self) -> None:
        """End all that waits, and the threads. What is asked for afterwards begins anew."""
        if self._process != os.getpid():
            return
        self.end_waits()
        self._pool.close()
        self._begin()

    def end_waits(self) -> None:
        """Have whatever waits, and what is asked for until `close`, raise ClosedError. Waits for nothing."""
        self._closed.set()
        with self._may_begin:
            self._may_begin.notify_all()

    # -- How it is done ------------------------------------------------------------------------------------

    def _read_one(self, piece: Piece) -> None:
        if len(piece.into):

            def attempt(client: ObjectStore) -> tuple[None, int]:
                client.read(piece)
                return None, len(piece.into)

            self._perform(piece.address, attempt)

    def _perform(self, address: str, attempt: Callable[[ObjectStore], tuple[T, int]]) -> T:
        """Make a request until it is answered. attempt: returns the answer, and its bytes."""
        client, closed = self._client_of(address), self._closed
        retrying: Retrying | None = None
        me = threading.get_ident()
        try:
            while True:
                limit = self._await_turn(closed)
                began = time.perf_counter()
                kind, nbytes = "final", 0
                try:
                    answer, nbytes = attempt(client)
                    self._answered.add(client)
                    return answer
                except RequestError as error:
                    kind, reason = error.kind, error
                finally:
                    self._has_ended(limit, kind, nbytes)
                if reason.kind not in ("refused", "passing"):
                    raise self._said(address, client, reason) from reason
                now = time.perf_counter()
                retrying = retrying or Retrying(self._retry_seconds, began)
                if reason.is_answer:
                    self._answered.add(client)
                is_known = client in self._answered
                retrying.budget_seconds = self._retry_seconds if is_known else self._first_answer_seconds
                pause = retrying.pause_seconds(now, random.random())
                if pause is None:
                    self._lost.append(Lost(began, now))
                    attempts = format_count(retrying.count, "attempt")
                    what = "store" if is_known else "address, as nothing has answered there yet"
                    raise DataError(
                        f"{without_secrets(address)} cannot be read: {reason}; {attempts} in "
                        f"{format_seconds(now - retrying.began)} failed: check the {what}, or give more time by "
                        "storage_options={'retry_seconds': ...}"
                    ) from reason
                self._waiting[me] = address, retrying.count, str(reason), retrying.began
                closed.wait(pause)
                self._lost.append(Lost(began, time.perf_counter()))
        finally:
            self._waiting.pop(me, None)

    def _said(self, address: str, client: ObjectStore, reason: RequestError) -> DataError:
        """Return the error of what trying again does not help."""
        shown = without_secrets(address)
        if reason.kind == "missing":
            return MissingObject(
                f"{shown} has vanished or was never there ({reason}), asked as {client.identity}: check the address, "
                'or open the data set again, with refresh="full"'
            )
        if reason.kind == "forbidden":
            return DataError(
                f"{shown} may not be read by {client.identity} ({reason}): give this identity the right to list and "
                "read it, or other credentials"
            )
        return DataError(f"{shown} {reason}")

    def _await_turn(self, closed: threading.Event) -> RequestLimit:
        """Wait until a request may begin; return the limit that counts it, which `close` replaces."""
        with self._may_begin:
            while not self._limit.has_space and not closed.is_set():
                self._may_begin.wait()
            if closed.is_set():
                raise ClosedError("closed while a request to the store was to be made")
            self._limit.began()
            return self._limit

    def _has_ended(self, limit: RequestLimit, kind: str, nbytes: int) -> None:
        with self._may_begin:
            before = limit.limit
            if kind == "refused":
                limit.refused(time.perf_counter())
            else:
                limit.ended(nbytes, time.perf_counter())
            self._may_begin.notify(1 + max(0, limit.limit - before))

    def _client_of(self, address: str) -> ObjectStore:
        if self._process != os.getpid():  # after a fork another thread may have held a lock
            self._begin()
        root = root_of(address)
        with self._clients_lock:
            client = self._clients.get(root)
            if client is None:
                client = self._clients[root] = client_of(root, self.options, self._timeout_seconds)
            return client

    def _each(self, call: Callable[[Any], T], items: Sequence[Any]) -> list[T | Exception]:
        """Call a function of each item, as many at once as the limit lets; return answers and errors in order."""
        answers: list[Any] = [None] * len(items)
        todo = deque(range(len(items)))
        helpers = min(len(items) - 1, self.most)
        is_over: SimpleQueue[None] = SimpleQueue()

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    index = todo.popleft()
                    try:
                        answers[index] = call(items[index])
                    except Exception as error:
                        answers[index] = error

        def help_out() -> None:
            try:
                work()
            finally:
                is_over.put(None)

        asked = 0
        try:
            while asked < helpers and self._pool.ask(help_out, self._limit.limit):
                asked += 1
            work()
        finally:
            todo.clear()
            for _ in range(asked):
                is_over.get()
        return answers


class _Pool:
    """Threads that carry requests, as many as there is work for. One that is closed is not used again."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        #: Protects what follows: the threads, how many have nothing to do, and whether it is closed.
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle, self._is_closed = 0, False

    def ask(self, work: Callable[[], None], most: int) -> bool:
        """Have a thread do something; return False where there can be no more. most: threads there may be."""
        with self._lock:
            if self._is_closed:
                return False
            if self._idle:
                self._idle -= 1
                self._work.put(work)
                return True
            if len(self._threads) >= most:
                return False
            thread = threading.Thread(target=self._run, args=(work,), name="penstock-request", daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # at the limit of threads, those that there are do it
            with self._lock:
                self._threads.discard(thread)
            return False
        return True

    def close(self) -> None:
        """End the threads, and wait a moment for those that are at a request."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        for _ in threads:
            self._work.put(_end)
        deadline = time.monotonic() + _IDLE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while work is not _end:
                work()
                work = _end
                with self._lock:
                    self._idle += 1
                try:
                    work = get_within(self._work, _IDLE_SECONDS)
                except Empty:
                    with self._lock:
                        if self._idle:  # else somebody has just counted on this one
                            self._idle -= 1
                            return
                    work = self._work.get()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


class MissingObject(DataError):
    """There is no object at an address."""


def _end() -> None:
    """Tell a thread of the pool to end."""


def _seconds(options: dict[str, Any], name: str, usual: float) -> float:
    value = options.pop(name, usual)
    check_wait(f"{name} of storage_options", value)
    return float(value)


def check_options(storage_options: object) -> None:
    """Raise ConfigError unless these are options by name, or None."""
    if storage_options is None:
        return
    if not isinstance(storage_options, Mapping) or not all(isinstance(name, str) for name in storage_options):
        raise ConfigError(
            f"storage_options is of type {type(storage_options).__name__}; it is a dict of options by name, such as "
            "{'anon': True}, or None"
        )


def objects_of(place: str, storage_options: Mapping[str, Any] | None) -> Objects | None:
    """Return what reads a place; None where that is on a file system of this host.

    Raises: ConfigError for options of a path, or what is no mapping.
    """
    check_options(storage_options)
    if any(map(is_address, place.split("\n"))):
        return Objects(storage_options)
    if storage_options:
        names = ", ".join(sorted(map(str, storage_options)))
        raise ConfigError(
            f"storage_options ({names}) are of an address such as s3://bucket/train; {place} is a path"
        )
    return None


def objects_in(source: object) -> Objects | None:
    """Return what a source reads objects with; None where it does not."""
    # A selection has them in the source that it is of.
    found = getattr(source, "objects", None) or getattr(getattr(source, "source", None), "objects", None)
    return found if isinstance(found, Objects) else None


#: A piece of an object: where it begins, and its bytes.
Window = tuple[int, bytes | bytearray]


class RemoteFile(io.RawIOBase):
    """An object as whoever indexes it reads it: here and there, mostly forwards. One thread reads it at a time.

    What lies between two reads is read too where that is less than a request takes.
    """

    def __init__(self, objects: Objects, facts: Facts) -> None:
        self._objects, self._facts = objects, facts
        #: What is here: where it begins, and its bytes. The first one follows what is read; the others were brought.
        self._windows: list[Window] = [(0, b"")]
        self._at = 0

    def pread(self, size: int, offset: int) -> bytes:
        """Return what `os.pread` would. Raises: DataError."""
        nbytes = self._facts.nbytes
        end = min(offset + size, nbytes)
        for begin, window in self._windows:
            if begin <= offset <= end <= begin + len(window):
                return bytes(window[offset - begin : end - begin])
        window_end = sum((self._windows[0][0], len(self._windows[0][1])))
        is_near = 0 <= offset - window_end <= _READ_OVER_BYTES and window_end
        until = min(max(offset + (_FAR_BYTES if is_near else _NEAR_BYTES), end), nbytes)
        self._windows[0] = offset, self._read([(offset, max(offset, until))])[0]
        return bytes(self._windows[0][1][: max(end, offset) - offset])

    def bring(self, places: Sequence[tuple[int, int]]) -> None:
        """Have some places here, begin and end of each, read all at once; forget those before. Raises: DataError."""
        self.keep(self.fetched(places))

    def keep(self, windows: Sequence[Window]) -> None:
        """Have here what `fetched` returned; what was here before is forgotten."""
        self._windows[1:] = windows

    def fetched(self, places: Sequence[tuple[int, int]]) -> list[Window]:
        """Read some places, begin and end of each, all at once. Any thread may call it. Raises: DataError."""
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(places):
            if joined and begin - joined[-1][1] <= _READ_OVER_BYTES:
                joined[-1] = joined[-1][0], max(joined[-1][1], end)
            else:
                joined.append((begin, end))
        found = self._read(joined)
        return [(begin, window) for (begin, _), window in zip(joined, found, strict=True)]

    def _read(self, places: Sequence[tuple[int, int]]) -> list[bytearray]:
        facts, pieces = self._facts, list[Piece]()
        windows = [bytearray(max(0, min(end, facts.nbytes) - begin)) for begin, end in places]
        for (first, _), window in zip(places, windows, strict=True):
            for at in range(0, len(window), _FAR_BYTES):
                into = memoryview(window)[at : at + _FAR_BYTES]
                pieces.append(Piece(facts.address, first + at, into, facts.nbytes, facts.stamp))
        for _, error in self._objects.read(pieces):
            raise error
        return windows

    def whole(self) -> bytearray:
        """Return all of it. Raises: DataError."""
        return self._read([(0, self._facts.nbytes)])[0]

    # As a file of Python's, for libraries.

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._facts.nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        found = self.pread(len(target), self._at)
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


#: A request of 20 ms at 100 MB/s reads as much.
_READ_OVER_BYTES = 2 << 20
_NEAR_BYTES, _FAR_BYTES = 64 << 10, 8 << 20
