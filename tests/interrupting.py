"""Ctrl-C at every place in turn at which Python may raise KeyboardInterrupt, and where the main thread waits."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.patience import wait_until

#: After these instructions the interpreter looks for signals, and raises what a handler raises.
SIGNALS_COME_AFTER = {
    number
    for name, number in dis.opmap.items()
    if name.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD")
}


@cache
def handlers(code: CodeType) -> dict[int, int]:
    """Return where an exception goes from each instruction that something catches, by offset."""
    return {
        offset: entry.target
        for entry in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2)
    }


class Interrupter:
    """Raises KeyboardInterrupt in the n-th place at which this thread may meet a signal.

    The interpreter would raise it one instruction earlier than a trace function can. Places where that makes a
    difference to who catches it, as at the end of a `with`, are left out.

    place: from 0. traces: whether places in some code count. where: in which function and line it struck, or "".
    """

    def __init__(self, place: int, traces: Callable[[CodeType], bool]) -> None:
        self.where = ""
        self._left = place
        self._traces = traces
        #: The offset of the last instruction of each frame.
        self._last: dict[FrameType, int] = {}

    @property
    def has_struck(self) -> bool:
        return self._left < 0

    def __enter__(self) -> Interrupter:
        self._tracer_before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._tracer_before)
        self._last.clear()

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == __file__ or not self._traces(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        return self._see

    def _see(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode" or self.has_struck:
            return self._see
        code, now = frame.f_code, frame.f_lasti
        before = self._last.get(frame)
        self._last[frame] = now
        if before is None or code.co_code[before] not in SIGNALS_COME_AFTER:
            return self._see
        if handlers(code).get(before) == handlers(code).get(now):
            self._left -= 1
            if self._left < 0:
                self.where = f"{code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._see


def every_place(traces: Callable[[CodeType], bool], stride: int = 1) -> Iterator[Interrupter]:
    """Yield interrupters that strike later and later, until one strikes no more."""
    for place in count(0, stride):
        interrupter = Interrupter(place, traces)
        yield interrupter
        if not interrupter.has_struck:
            return


def is_asleep() -> bool:
    """Return whether the main thread waits in a call of the system."""
    stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def interrupt_main_in(function: Callable[..., Any]) -> threading.Thread:
    """Start a thread that sends Ctrl-C to the main thread once that waits inside of a function.

    One that came earlier, as on a busy machine after so many seconds, would end pytest.
    """
    main = threading.main_thread().ident
    assert main is not None

    def place() -> tuple[int, int] | None:
        frame = sys._current_frames()[main]
        found = id(frame), frame.f_lasti
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not function.__code__:
            outer = outer.f_back
        return None if outer is None or not is_asleep() else found

    seen: list[tuple[int, int] | None] = [None]

    def waits() -> bool:
        seen.append(place())
        return seen[-1] is not None and seen[-1] == seen[-2]

    def interrupt() -> None:
        wait_until(waits)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread
