"""Stopping in time when a scheduler takes the machine away: all ranks after the same step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Self

from penstock.errors import ConfigError, RankError, WaitTimeout
from penstock.ranks import named_ranks
from penstock.ranks.agreement import Messages, StopAgreement
from penstock.ranks.transport import TIMEOUT_SECONDS, RankTransport, pause_seconds
from penstock.ranks.transport_of_job import transport_of_this_job
from penstock.report import checked_report, print_report
from penstock.validate import is_number

#: Between two looks for a signal or a message while no rank is asked to stop: twenty times what a look takes, so that
#: thousands of ranks cost no core, within these bounds.
LEAST_LOOK_SECONDS = 0.1
MOST_LOOK_SECONDS = 1.0
PAUSES_PER_LOOK = 20

#: A signal that comes again within this is the same request, delivered twice: by the scheduler to every process and
#: by the launcher to its children.
REPEAT_SECONDS = 3.0

_NEVER_HANDLED = (signal.SIGKILL, signal.SIGSTOP)


class StopOnSignal:
    """Tells a training loop, on all ranks at the same step, that it should save and stop.

        with StopOnSignal(grace_seconds=30) as stop:
            for step, batch in enumerate(loader):
                train(batch)
                if stop.agreed(step):  # the same answer on every rank
                    store.save(step, state).wait()
                    break
        sys.exit(stop.exit_code)  # 143 after a SIGTERM, 0 if the loop ended by itself

    grace_seconds: what the scheduler leaves between the signal and the end.
    signals: which ask to stop. Slurm sends SIGTERM by itself, and others on request: `--signal=USR1@120`.
    report: gets a line when the stop is agreed on, from rank 0, and one if it took longer than the grace.
    transport: between the ranks, of its own; None: that of this process's job.

    Every rank enters and leaves it, in its main thread, which alone may change what signals do. It is enough that
    one rank gets the signal. While none does, `agreed` sends nothing and waits for nobody; a thread looks ten times
    a second (at worst, once) whether another rank was asked to stop. The same signal again, after 3 seconds or in a
    process that was forked from this one, does what it did before; afterwards, so do all. A handler that was not
    set from Python cannot be kept: the default takes its place. A scheduler that signals every process of the job
    also ends the workers of a PyTorch DataLoader, and their loop with them: have it signal the ranks alone, or load
    with threads.
    """

    def __init__(
        self,
        *,
        grace_seconds: float,
        signals: Sequence[int] = (signal.SIGTERM,),
        report: Callable[[str], None] | None = None,
        transport: RankTransport | None = None,
    ) -> None:
        if not (is_number(grace_seconds) and grace_seconds > 0):
            raise ConfigError(
                f"grace_seconds is {grace_seconds!r}; a snapshot takes time: give the seconds that your scheduler "
                "leaves between the signal and the end"
            )
        given = tuple(signals) if isinstance(signals, Iterable) else ()
        known = [number for number in signal.valid_signals() if number not in _NEVER_HANDLED]
        if not given or any(number not in known for number in given):
            raise ConfigError(
                f"signals is {signals!r:.80}; name at least one that a process may handle, in a list: "
                "[signal.SIGTERM]"
            )
        self._grace_seconds = grace_seconds
        self._signals = given
        self._report = checked_report(report) or print_report
        if transport is not None and not all(
            hasattr(transport, name) for name in ("rank", "size", "send", "receive")
        ):
            raise ConfigError(
                f"transport is {transport!r:.80}; give an object with rank, size, send and receive, or None for "
                "the ranks of this process's job"
            )
        self._transport = transport or transport_of_this_job()
        # Others wait longer than rank 0, so that it can tell them who is missing.
        self._patience_seconds = min(TIMEOUT_SECONDS, grace_seconds / 2) * (
            1 if self._transport.rank == 0 else 2
        )
        self._previous: dict[int, Any] = {}
        self._process: int | None = None  # whose signals are ours, once entered
        # Written by the handler and read by others, without a lock: a handler must not wait for one.
        self._signal: int | None = None
        self._signalled_at = 0.0
        self._agreement = StopAgreement(self._transport.rank, self._transport.size)  # under _changed
        self._error: Exception | None = None  # under _changed: why no stop can be agreed on
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def requested(self) -> bool:
        """Return whether this rank got a signal."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal, the exit status of what a signal ended; 0 if the loop did not stop."""
        return 128 + (self._agreement.signal or 0) if self._stopped else 0

    def agreed(self, step: int) -> bool:
        """Return whether all ranks stop after this step; call it once after every step, on every rank.

        While a stop is being agreed on it waits, for milliseconds as a rule, then returns the same on every rank.

        Raises: RankError on every rank if some did not answer within half the grace, at most 60 s, or left the loop
            by an exception: it names them.
        """
        if self._transport.size == 1 and self._signal is not None:
            self._agreement.tell(self._signal)
        with self._changed:
            # Not without a time-out: a wait for ever could not be interrupted by Ctrl-C on every platform.
            while self._agreement.is_held and self._error is None:
                self._changed.wait(1.0)
            if self._error is not None:
                raise self._error
            if self._agreement.failure is not None:
                raise RankError(self._agreement.failure)
            stops = self._agreement.pass_call()
        if stops and not self._stopped:
            self._stopped = True
            if self._transport.rank == 0:
                self._report(self._describe_agreement(step))
        return stops

    def __enter__(self) -> Self:
        if self._process is not None:
            raise ConfigError("a StopOnSignal is entered once: make another for another loop")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "StopOnSignal is entered in a thread; only a process's main thread may handle signals"
            )
        self._process = os.getpid()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        if self._transport.size > 1:
            self._thread = threading.Thread(target=self._look, name="penstock-stop", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A trainer that has set its own handler since keeps that one.
        self._restore([number for number in self._previous if signal.getsignal(number) == self._handle])
        self._leaving.set()
        if self._thread is not None:
            self._thread.join()
            failure = None
            if isinstance(error, Exception):
                rank = f"rank {self._transport.rank} of {self._transport.size}"
                failure = f"{rank} left the loop: {type(error).__name__}: {error}"
            with contextlib.suppress(RankError, WaitTimeout):
                self._send(self._agreement.leave(failure))
        if self._stopped and self._signal is not None:
            took_seconds = time.monotonic() - self._signalled_at
            if took_seconds > self._grace_seconds:
                self._report(
                    f"the last step and its snapshot took {took_seconds:.1f} s from {_name(self._signal)} on, but "
                    f"grace_seconds is {self._grace_seconds:g}: the next time the job may be killed before the "
                    "snapshot is durable; ask the scheduler for an earlier signal, or save to a faster tier"
                )

    # -- Signals --

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; nothing else may happen here, between any two instructions of the training."""
        if os.getpid() != self._process:  # forked from the training, such as a worker of a DataLoader
            self._give_way(number, frame)
        elif self._signal is None:
            self._signalled_at = time.monotonic()
            self._signal = number
        elif time.monotonic() - self._signalled_at > REPEAT_SECONDS:
            self._give_way(number, frame)

    def _give_way(self, number: int, frame: FrameType | None) -> None:
        self._restore(self._previous)
        previous = signal.getsignal(number)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            os.kill(os.getpid(), number)

    def _restore(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            previous = self._previous[number]
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    # -- The thread --

    def _look(self) -> None:
        """Carry messages between the ranks until the loop is over or a stop is agreed on."""
        awaited_since: float | None = None
        try:
            while not self._leaving.is_set():
                began = time.monotonic()
                self._exchange_messages()
                with self._changed:
                    self._changed.notify_all()
                    if self._agreement.stop_call is not None or self._agreement.over:
                        return
                    missing = self._agreement.missing
                now = time.monotonic()
                if not missing:
                    pause = max(LEAST_LOOK_SECONDS, PAUSES_PER_LOOK * (now - began))
                    self._leaving.wait(min(pause, MOST_LOOK_SECONDS))
                    continue
                awaited_since = awaited_since or began
                if now - awaited_since > self._patience_seconds:
                    self._give_up(missing)
                self._leaving.wait(pause_seconds(now - awaited_since))
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _exchange_messages(self) -> None:
        with self._changed:
            messages = [] if self._signal is None else self._agreement.tell(self._signal)
        self._send(messages)
        for sender in range(1, self._transport.size) if self._transport.rank == 0 else [0]:
            while (data := self._transport.receive(sender)) is not None:
                with self._changed:
                    messages = self._agreement.receive(sender, json.loads(data))
                self._send(messages)

    def _give_up(self, missing: Sequence[int]) -> None:
        failure = (
            f"{named_ranks(missing)} of {self._transport.size} did not answer within {self._patience_seconds:g} s when "
            "the ranks were to agree after which step to stop; the log there may say whether it ended, and every "
            "rank must be within a StopOnSignal"
        )
        with self._changed:
            messages = self._agreement.give_up(failure)
        self._send(messages)

    def _send(self, messages: Messages) -> None:
        for to, message in messages:
            self._transport.send(to, json.dumps(message).encode())

    def _describe_agreement(self, step: int) -> str:
        ranks = f"all {self._transport.size} ranks stop" if self._transport.size > 1 else "training stops"
        line = f"{_name(self._agreement.signal or 0)}: {ranks} after step {step}"
        if self._signal is None:  # another rank got it
            return line
        left_seconds = self._signalled_at + self._grace_seconds - time.monotonic()
        return f"{line}, with {left_seconds:.1f} s of {self._grace_seconds:g} s left for a snapshot"


def _name(number: int) -> str:
    return signal.Signals(number).name
