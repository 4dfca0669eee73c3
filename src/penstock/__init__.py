"""Training I/O computed ahead: what is read, when, from where, and how long a training will wait for it.

The names below are the public face; everything else is reached by its sub-package. They are loaded when they
are first used, so that `import penstock` costs next to nothing and imports neither PyTorch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.checkpoint import SnapshotStore
    from penstock.errors import PenstockError
    from penstock.flow.waits import report_waits_on
    from penstock.loader import Loader, LoaderConfig, predict
    from penstock.machine import Machine, StorageClass
    from penstock.measure.calibrate import calibrate
    from penstock.measure.watch import watch
    from penstock.plan import AccessPlan, BundleShuffle, FullShuffle
    from penstock.plan.recorded import read_trace
    from penstock.store import open_source
    from penstock.trace import Trace

__all__ = [
    "AccessPlan",
    "BundleShuffle",
    "FullShuffle",
    "Loader",
    "LoaderConfig",
    "Machine",
    "PenstockError",
    "SnapshotStore",
    "StorageClass",
    "Trace",
    "calibrate",
    "open_source",
    "predict",
    "read_trace",
    "report_waits_on",
    "watch",
]

_HOMES = {
    "AccessPlan": "penstock.plan",
    "BundleShuffle": "penstock.plan",
    "FullShuffle": "penstock.plan",
    "Loader": "penstock.loader",
    "LoaderConfig": "penstock.loader",
    "Machine": "penstock.machine",
    "PenstockError": "penstock.errors",
    "SnapshotStore": "penstock.checkpoint",
    "StorageClass": "penstock.machine",
    "Trace": "penstock.trace",
    "calibrate": "penstock.measure.calibrate",
    "open_source": "penstock.store",
    "predict": "penstock.loader",
    "read_trace": "penstock.plan.recorded",
    "report_waits_on": "penstock.flow.waits",
    "watch": "penstock.measure.watch",
}

if not TYPE_CHECKING:  # a checker that saw it would accept any name

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
