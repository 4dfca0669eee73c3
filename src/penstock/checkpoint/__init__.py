"""A plan of writes, run for a training: snapshots of its state, as differences where that is smaller, kept safely.

`SnapshotStore` is where to begin. `Keep` says which snapshots stay, `AutoDistance` how far baselines are apart;
all ranks of a job write one snapshot (`alone`: each its own), `Shard` says which part of an array one of them has;
`random_state` is for a state what a model's `state_dict` is; `StopOnSignal` saves before a scheduler ends the job;
`Refresher` keeps the weights of an inference worker up to date.
"""

from penstock.checkpoint.generators import random_state, set_random_state
from penstock.checkpoint.inspecting import Listed
from penstock.checkpoint.preemption import StopOnSignal
from penstock.checkpoint.ranks import alone, ranks_of_this_job
from penstock.checkpoint.restoring import Restored
from penstock.checkpoint.saving import Saved, Saving
from penstock.checkpoint.state import Shard
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.wire import Refreshed, Refresher
from penstock.policy.keeping import Keep
from penstock.policy.snap_distance import AutoDistance

__all__ = [
    "AutoDistance",
    "Keep",
    "Listed",
    "Refreshed",
    "Refresher",
    "Restored",
    "Saved",
    "Saving",
    "Shard",
    "SnapshotStore",
    "StopOnSignal",
    "alone",
    "random_state",
    "ranks_of_this_job",
    "set_random_state",
]
