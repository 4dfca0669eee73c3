"""Work on many items at once, results in the order of the items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from penstock.closing import Closeable

T = TypeVar("T")
R = TypeVar("R")


class _Task(Generic[R]):
    """One call: made by a worker, its outcome waited for by who asked."""

    def __init__(self, work: Callable[[Any], R], item: Any) -> None:
        self._work = work
        self._thing = item
        self._done = threading.Event()
        self._result: R
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work(self._thing)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def result(self) -> R:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def in_groups(
    items: Iterable[T], size_of: Callable[[T], int], most_size: int, most_items: int
) -> Iterator[list[T]]:
    """Yield items in groups: to hand one to a thread costs some 30 us.

    A group ends with the item that makes its size `most_size` or more, or their number `most_items`.
    """
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= most_size or len(group) >= most_items:
            yield group
            group, size = [], 0
    if group:
        yield group


def _first_of(begun: deque[_Task[R]]) -> R:
    """Return the first result, and only then forget its task: who interrupts this waits for it as for the others."""
    result = begun[0].result()
    begun.popleft()
    return result


class Workers(Closeable):
    """Threads that work for one caller at a time.

    None of them: the caller itself works, on each item when its turn comes.
    They start at once: an interpreter that is shutting down starts no more of them, and a save may still be under
    way then. Not a `ThreadPoolExecutor` for the same reason: that one takes no work once shutdown has begun.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: deque[_Task[Any]] = deque()
        #: guards _tasks, _closed and _working
        self._changed = threading.Condition()
        self._closed = False
        #: Threads that have not ended. Waited for in their place: a join that a signal interrupts takes a living
        #: thread for ended.
        self._working = 0
        self._threads: list[threading.Thread] = []
        try:
            for index in range(threads):
                thread = threading.Thread(target=self._run, name=f"{name}-{index}")
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def map(self, work: Callable[[T], R], items: Iterable[T], ahead: int = 2) -> Iterator[R]:
        """Return an iterator over work(item) of each item, in their order.

        `items` is iterated by the caller's thread, at most `ahead` times as many ahead as there are threads.
        Raises: what `work` raised, when its turn comes; what was begun is finished, nothing more is begun.
        """
        return self._map(work, items, ahead) if self._threads else map(work, items)

    def _map(self, work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
        begun: deque[_Task[R]] = deque()
        try:
            for item in items:
                if len(begun) >= ahead * len(self._threads):
                    yield _first_of(begun)
                task = _Task(work, item)
                begun.append(task)
                with self._changed:
                    self._tasks.append(task)
                    self._changed.notify()
            while begun:
                yield _first_of(begun)
        finally:
            with self._changed:
                for task in begun:
                    if task in self._tasks:
                        self._tasks.remove(task)
                        task._done.set()
            for task in begun:
                task._done.wait()

    def _run(self) -> None:
        # Counted by itself: who starts it may be interrupted before it could.
        with self._changed:
            self._working += 1
        try:
            self._work()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task.run()

    def close(self) -> None:
        """End the threads once they have done what was asked; twice is harmless."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._working > 0:
                self._changed.wait()
        for thread in self._threads:
            thread.join()
