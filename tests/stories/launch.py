"""Run a script as one rank of a job, note the batches that it is given, and end it with one of them.

Run as: launch.py SCRIPT NOTES ENVIRONMENT SIGNAL AFTER AWAITED

ENVIRONMENT: JSON. SIGNAL: that this rank gets as it asks for the batch after so many; 0: none. AWAITED: a pattern of
files, of which one has to be there before.
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
from penstock.loader import Loader

script, notes, environment, number, after, awaited = sys.argv[1:]
os.environ.update(json.loads(environment))
os.chdir(os.path.dirname(script))
sys.path.insert(0, os.path.dirname(script))
# Lightning would start MPI to find out whether it runs under it, which leaves shared memory where it is killed.
sys.modules["mpi4py"] = None  # type: ignore[assignment]
given = 0
stops: list[StopOnSignal] = []
wait_for_batch, enter = Loader._wait_for_batch, StopOnSignal.__enter__


def note(self: Loader, epoch: int) -> Any:
    global given
    if given == int(after) and int(number):
        while awaited and not list(Path().glob(awaited)):
            time.sleep(0.005)
        os.kill(os.getpid(), int(number))
        while (
            stops and stops[0]._thread and stops[0]._agreement.signal is None
        ):  # steps are faster than the ranks' agreement
            time.sleep(0.001)
    step = self.position[1]
    batch = wait_for_batch(self, epoch)
    given += 1
    rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in batch[0]]
    with open(notes, "a") as file:
        file.write(json.dumps([epoch, step, rows]) + "\n")
    return batch


def remember(self: StopOnSignal) -> StopOnSignal:
    stops.append(self)
    return enter(self)


Loader._wait_for_batch = note  # type: ignore[method-assign]
StopOnSignal.__enter__ = remember  # type: ignore[method-assign, assignment]
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
