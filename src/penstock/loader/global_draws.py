"""What other libraries keep for a whole process: global random generators, threads, PyTorch's worker info and memory.

Set in worker processes only. No library is imported for it: one that is not loaded has nothing to set.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.plan.random import derive_key

#: Before libraries are loaded: many take as many threads as there are processors, in each process.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


def seed_all(seed: int, purpose: str) -> None:
    """Seed the global generators of `random`, NumPy and PyTorch: what is drawn next follows from these two alone."""
    key = derive_key(seed, purpose)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - somebody else's code draws from it
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(key)  # 90 us less than torch.manual_seed, which asks all devices


def global_states() -> dict[str, Any]:
    """Return the state of each global generator, by its library, to be compared."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - somebody else's code draws from it
    states = {
        "random": random.getstate(),
        "NumPy": (legacy["state"]["key"].tobytes(), legacy["state"]["pos"]),
    }
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "default_generator"):
        states["PyTorch"] = torch.default_generator.get_state().numpy().tobytes()
    return states


def drawn_since(before: dict[str, Any]) -> set[str]:
    """Return the libraries whose global generators have been drawn from. before: what `global_states` returned."""
    after = global_states()
    return {name for name in before if before[name] != after[name]}


def keeping_global_states(call: Callable[[], object]) -> set[str]:
    """Call something, and return the libraries whose global generators it drew from, which are as before."""
    before, legacy, python = global_states(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    torch = sys.modules.get("torch")
    of_torch = None if "PyTorch" not in before or torch is None else torch.default_generator.get_state()
    try:
        call()
        return drawn_since(before)
    finally:
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)
        if torch is not None and of_torch is not None:
            torch.default_generator.set_state(of_torch)


def compute_alone() -> None:
    """Have PyTorch and OpenCV compute with one thread: processors are shared by samples, not inside them."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(1)


def allocate_alone() -> None:
    """Have PyTorch's `default_collate` make a batch in memory of this process.

    Where there is a worker info, it takes shared memory for it: files in /dev/shm, which containers give 64 MB. What a
    worker process makes is copied to memory shared with its parent in any case, see `penstock.flow.channel`.
    """
    storage = getattr(sys.modules.get("torch"), "UntypedStorage", None)
    if hasattr(storage, "_new_shared"):
        setattr(storage, "_new_shared", classmethod(_new_of_own))  # noqa: B010


def _new_of_own(storage: Any, size: int, *, device: Any = "cpu") -> Any:
    return storage(size, device=device)


class _WorkerInfo(NamedTuple):
    """As PyTorch's class of this name."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


def set_worker_info(number: int, count: int, seed: int, dataset: Any) -> None:
    """Have `torch.utils.data.get_worker_info()` return what it does in a DataLoader's worker."""
    if "torch.utils.data" in sys.modules:
        worker = sys.modules["torch.utils.data"]._utils.worker
        kind = getattr(worker, "WorkerInfo", _WorkerInfo)
        worker._worker_info = kind(id=number, num_workers=count, seed=seed, dataset=dataset)
