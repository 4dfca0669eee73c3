"""Starting a loader's threads where Ctrl-C cannot come between them."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from queue import SimpleQueue

from penstock.errors import no_thread


class Starter:
    """Has one call made once, on a thread of its own, for callers that Ctrl-C may interrupt anywhere.

    Threads that are started one by one from the training's thread could be left half started. An interrupted caller
    asks again: it waits for the call that is under way, or has it made.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def is_started(self) -> bool:
        """Whether the call was made."""
        return self._is_over

    def ensure_started(self, start: Callable[[], None]) -> None:
        """Return once `start` was called, by this call or one before: under a lock that nothing else takes.

        Raises: what it raised, each time; DataError if no thread can be started.
        """
        if not self._is_over:
            over: SimpleQueue[None] = SimpleQueue()
            try:
                # Not a threading.Thread: Ctrl-C in its start() can leave a lock held, and the new thread behind it.
                _thread.start_new_thread(self._start_once, (start, over))
            except RuntimeError as refusal:  # the limit of threads
                raise no_thread(refusal) from refusal
            over.get()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _start_once(self, start: Callable[[], None], over: SimpleQueue[None]) -> None:
        with self._lock:
            if not self._is_over:
                try:
                    start()
                except BaseException as error:
                    self._error = error
                self._is_over = True
        over.put(None)
