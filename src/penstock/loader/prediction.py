"""What a loader will do, on a virtual clock: its plan and scheduler, on a machine's costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from penstock.compiling import Part
from penstock.errors import ConfigError
from penstock.loader.config import JOBS, LoaderConfig
from penstock.loader.front_end import NUMPY
from penstock.loader.keep import MEASURING
from penstock.loader.opened import not_predictable
from penstock.loader.setup import Setup, read_machine, set_up, with_memory
from penstock.machine import Machine, StorageClass
from penstock.policy.forms import part_of
from penstock.policy.loading import Job
from penstock.report import print_report
from penstock.simulate import loading
from penstock.store.calls import Calls
from penstock.trace import Trace

#: Virtual time, compiled: for runs of many reads.
CLOCK = Part(loading.KERNELS, "run", loading.RUN, "how a run is predicted")


def prepare_clock(reads: int) -> None:
    """Have virtual time compiled, once on this machine and with a report, if a run has so many reads that it pays."""
    if reads >= loading.WORTH_COMPILING_READS:
        CLOCK.wait()


def predict(
    config: LoaderConfig,
    machine: Machine | str | os.PathLike[str] | None = None,
    *,
    step_seconds: float | Sequence[float] | None = None,
    epoch: int = 0,
    step: int = 0,
) -> Trace:
    """Return the trace that a loader of this configuration should leave, without making one.

    Nothing is read but the source's listing, and the first sample where a loader learns from it, too: what a picture
    takes while it is decoded, or the shape of a sample. No memory is taken for samples, and no thread stays.
    `Loader.predict` returns the same, but that a loader alone knows what local disks have from earlier runs.

    config: its memory may be more than this computer has.
    machine: with measured costs, or its file; the loader's memory is put in the place of its storage classes.
        config.machine unless given. Where it does not say what decoding costs, that is taken as free, and a line says
        so.
    step_seconds: that the training takes for each batch, or for one after the other; machine.compute says unless given.
    epoch, step: where the run begins, as for `Loader.start`.

    Raises: ConfigError if one of the first two is not known, if the plan has no such step, for a data set that reads by
        itself, and as `Loader`; DataError if the source or the file cannot be read.
    """
    if not isinstance(config, LoaderConfig):
        raise ConfigError(
            f"config is of type {type(config).__name__}; it is a LoaderConfig. A loader has a predict() of its own; "
            "what takes a plan without a source, or sizes of your own, is penstock.simulate.predict(Job(plan, "
            "sizes_bytes, machine), limits=...)"
        )
    setup = set_up(config, NUMPY, Calls(), runs=False)
    return predict_run(setup, machine, step_seconds, (epoch, step), print_report)


def predict_run(
    setup: Setup,
    machine: Machine | str | os.PathLike[str] | None,
    step_seconds: float | Sequence[float] | None,
    first: tuple[int, int],
    report: Callable[[str], None],
) -> Trace:
    """Return the trace of a run that was set up. Arguments and errors are those of `predict`.

    report: gets a line where the machine does not say what decoding costs.
    """
    if setup.is_of_data_set:
        raise not_predictable(setup.source)
    if setup.budget.jobs_bytes:
        raise ConfigError(
            f'share is "{JOBS}", and how far other jobs are is not known: penstock.predict(config) says what this one '
            "would do alone"
        )
    if setup.works_in_own_thread:
        raise ConfigError(
            "decoders is 0, so that nothing is loaded ahead, and a prediction is of what is: give decoders=1 or more"
        )
    if setup.plan.is_endless:
        raise ConfigError("epochs is None, and a run without end has no prediction: give epochs= or steps=")
    given = read_machine(machine, Calls())
    if given is None and not setup.is_measured:
        raise ConfigError(
            "machine is not known, here or in the configuration: penstock calibrate measures one, and machine= takes "
            "the file that it writes"
        )
    prepare_clock(setup.plan.reads(setup.rank))
    on = setup.machine
    if given is not None:
        known = {each.path: each for each in given.storage if each.path is not None}
        disks = [each for each in on.storage[1:] if each.backend != "memory"]
        costed = [
            part_of(known[each.path], each.name, each.capacity_bytes, _read_share(each, disks))
            if each.path in known
            else each
            for each in disks
        ]
        on = with_memory(given, setup.budget, setup.limits.decoders, setup.plan.ranks, costed)
    if not on.knows_decoding and (setup.pipeline is None or setup.pipeline.is_visual):
        report(
            f"machine= does not say what decoding costs (its preprocess), and it is taken as free: {MEASURING}"
        )
    sharing = setup.sharing
    return loading.predict(
        Job(
            setup.plan,
            setup.sizes_bytes,
            on,
            setup.seed,
            setup.rank,
            setup.form,
            None if sharing is None else sharing.ranks,
            first,
            None if sharing is None else sharing.held,
            None if sharing is None else sharing.tiers_bytes,
        ),
        limits=setup.limits,
        policy=setup.policy,
        extents=setup.extents,
        step_seconds=step_seconds,
        maps_peers=sharing is None or sharing.shared.is_mapped,
        held=setup.held if sharing is None else None,
        copied=setup.copied,
    )


def _read_share(part: StorageClass, disks: Sequence[StorageClass]) -> float:
    """Return a part's share of what its disk gives: 1 for a whole one."""

    def rate(each: StorageClass) -> float:
        assert each.read is not None, "a disk has a read curve"
        return each.read.at(1)

    return rate(part) / sum(rate(each) for each in disks if each.path == part.path)
