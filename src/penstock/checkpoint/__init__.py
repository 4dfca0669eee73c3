"""A plan of writes, run for a training: snapshots of its state, as differences where that is smaller, kept safely.

`SnapshotStore` is where to begin, `StoreConfig` its arguments as a value. `Keep` says which snapshots stay,
`AutoDistance` how far baselines are apart; all ranks of a job write one snapshot (`alone`: each its own), `Shard` says
which part of an array one of them has; `random_state` is for a state what a model's `state_dict` is; `StopOnSignal`
saves before a scheduler ends the job; `Refresher` keeps the weights of an inference worker up to date.

    state/    a state taken apart and put together again: its tree, tensors and types, the copy of it; which rank
              writes which tensor
    files/    the files of one snapshot: the manifest and the parts, written and read
    codecs/   how blocks are encoded
    tiers/    where snapshots lie: folders, object stores, and what is there
    drain/    from the fast tier to the slow one
    sync/     weights on the wire
    interop/  other people's checkpoints: read, written and sealed

`store` saves by what is `opened`. `writer` obeys what `penstock.policy.saving` decides, `housekeeping` what
`penstock.policy.retention` does.
"""

from penstock.checkpoint.config import StoreConfig
from penstock.checkpoint.inspecting import Listed
from penstock.checkpoint.preemption import StopOnSignal
from penstock.checkpoint.restoring import Restored
from penstock.checkpoint.saving import Saved, Saving
from penstock.checkpoint.state.flatten import Shard
from penstock.checkpoint.state.generators import random_state, set_random_state
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.sync.wire import Refreshed, Refresher
from penstock.policy.retention import Keep
from penstock.policy.snap_distance import AutoDistance
from penstock.ranks import alone, ranks_of_this_job

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
    "StoreConfig",
    "alone",
    "random_state",
    "ranks_of_this_job",
    "set_random_state",
]
