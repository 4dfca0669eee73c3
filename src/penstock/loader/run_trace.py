"""How the trace of a loader's run begins: with all from which the run can be predicted, by the same scheduler."""

from __future__ import annotations

import errno
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np

from penstock.loader.parts import Parts
from penstock.loader.transforms.decoders import decoder_versions
from penstock.plan.serialise import write_plan
from penstock.trace import TraceWriter
from penstock.trace.file import not_written


def begin_trace(parts: Parts, first: tuple[int, int]) -> None:
    """Make the file of a trace, if there is to be one, of a run that begins at (epoch, step). A full disk is reported.

    Raises: DataError if it cannot be written for another reason.
    """
    if parts.trace is None:
        return
    try:
        parts.collector.write_to(TraceWriter(parts.trace, _about(parts, first)))
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise not_written(parts.trace, error) from error
        parts.collector.break_off(error)


def _about(parts: Parts, first: tuple[int, int]) -> dict[str, Any]:
    setup = parts.setup
    form = setup.form or setup.jobs_form
    return {
        "loader": parts.name,
        "reads": "data set" if setup.is_of_data_set else "source",
        "loads": "when asked" if setup.works_in_own_thread else "ahead",
        "source": parts.fetcher.place,
        **parts.recorder.about,
        "versions": {
            "penstock": version("penstock"),
            "python": platform.python_version(),
            "numpy": np.__version__,
            **({} if setup.pipeline is None else decoder_versions()),
        },
        "plan": write_plan(setup.plan),
        "first_step": list(first),
        "machine": setup.machine.to_toml() if setup.is_measured else None,
        # As integers: NumPy's, which arguments may be, are no JSON.
        "memory": {name: int(size) for name, size in asdict(setup.budget).items()},
        "limits": {name: int(count) for name, count in asdict(setup.limits).items()},
        "cpus": int(setup.cpus),
        "policy": setup.policy.name,
        "keep": None if form is None else asdict(form),
        "sharing": None if (sharing := setup.sharing) is None else list(sharing.ranks),
        "tiers_bytes": None
        if sharing is None
        else [list(sharing.tiers_bytes[rank]) for rank in sharing.ranks],
    }
