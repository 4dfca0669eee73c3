"""Run a script as one rank of a job, note the batches that it is given, and end it with one of them.

Run as: launch.py SCRIPT NOTES ENVIRONMENT SIGNAL AT AWAITED

ENVIRONMENT: JSON. SIGNAL: that this rank gets as it asks for the batch AT of the run, counted over epochs; 0: none.
With an "e" after AT it gets it as it asks a loader without end, with which it evaluates, after that batch.
AWAITED: a pattern of files, of which one has to be there before.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from penstock.checkpoint import StopOnSignal
from penstock.loader.epoch_loop import EpochLoop, Pass
from penstock.loader.own_thread import OwnThread

script, notes, environment, number, at, awaited = sys.argv[1:]
os.environ.update(json.loads(environment))
os.chdir(os.path.dirname(script))
sys.path.insert(0, os.path.dirname(script))
# Lightning would start MPI to find out whether it runs under it, which leaves shared memory where it is killed.
sys.modules["mpi4py"] = None  # type: ignore[assignment]
is_signalled = False
reached = -1  # batch of the run that was asked for last
stops: list[StopOnSignal] = []
wait_for_batch, enter = EpochLoop._wait_for_batch, StopOnSignal.__enter__


def get_signal() -> None:
    """Get it once, and be sure that no step passes before all ranks know: steps are faster than their agreement."""
    global is_signalled
    if is_signalled:
        return
    is_signalled = True
    while awaited and not list(Path().glob(awaited)):
        time.sleep(0.005)
    os.kill(os.getpid(), int(number))
    while stops and stops[0]._thread and stops[0]._agreement.stop_call is None:
        time.sleep(0.001)


def note(self: EpochLoop, begun: Pass, epoch: int, own: OwnThread | None) -> Any:
    global reached
    if self._plan.is_endless:
        Path(notes).with_name(Path(notes).name.replace("notes", "evaluated")).touch()
        if int(number) and at.endswith("e") and reached >= int(at[:-1]):
            get_signal()
        return wait_for_batch(self, begun, epoch, own)
    step = self.position[1]
    reached = epoch * begun.whole_steps + step
    if int(number) and not at.endswith("e") and reached >= int(at):
        get_signal()
    batch = wait_for_batch(self, begun, epoch, own)
    rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in batch[0]]
    with open(notes, "a") as file:
        file.write(json.dumps([epoch, step, rows]) + "\n")
    return batch


def remember(self: StopOnSignal) -> StopOnSignal:
    stops.append(self)
    return enter(self)


EpochLoop._wait_for_batch = note  # type: ignore[method-assign]
StopOnSignal.__enter__ = remember  # type: ignore[method-assign, assignment]
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
