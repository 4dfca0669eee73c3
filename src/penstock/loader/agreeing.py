"""The ranks of a job agree on what they will read before any of them reads a sample.

A file that appears between the listings of two ranks, or a seed that differs, gives every rank another order: samples
are read twice, or never, and nothing looks wrong. Rank 0 lists what all find at one path (`listing_once`). One
exchange, in which every rank opens its source and describes what it would read, finds what differs nevertheless; a rank
that does not come is named by the time-out of `penstock.ranks`.

What is wrong on one rank alone is an error of all: that rank raises it as it is, the others name the rank. A wrong
argument keeps a rank from the first exchange, in which the others get the error instead (`leave_start`); what fails
once all agree, such as memory that is too small, is known to all by the last exchange (`Agreed.together`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.config import BOTH_OR_NEITHER, HOST, HOSTS, LoaderConfig
from penstock.loader.dataset import MapDataset
from penstock.loader.listing_once import START, list_once
from penstock.loader.opened import Opened, data_of, open_run, open_source_of, pipeline_of, plan_of, samples_of
from penstock.loader.resume import describe_data, describe_object, describe_run, flat_values, seed_of_state
from penstock.ranks import Ranks, named_ranks, place_in_mesh, shared_ranks
from penstock.ranks.exchange import raise_own_error
from penstock.ranks.transport_of_job import job_of_this_process
from penstock.store import Source
from penstock.store.calls import Calls
from penstock.trace.trace import JSON
from penstock.units import is_integer

#: Bits of a seed that is drawn: few enough to be typed.
_SEED_BITS = 32
#: Values that differ and are shown in one message; more are counted.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a rank reads.

    config: with a seed. opened: its source and plan.
    data: of `describe_data`, where ranks were compared by it.
    reports: whether this process reports for the job.
    uncompared: why the ranks of the plan were not compared; empty where they were, or where there is one.
    others: what shows that there are other processes, where this one reads everything.
    job: the ranks that were; None where none were.
    """

    config: LoaderConfig
    opened: Opened
    data: dict[str, JSON] | None
    reports: bool
    uncompared: str = ""
    others: str = ""
    job: Ranks | None = None

    def together(self, make: Callable[[], Any]) -> list[Any]:
        """Call a function that makes what this rank reads with, on all ranks; return what each returned, as JSON.

        Raises: what it raised; where it raised on another rank alone, an error that names that rank.
        """
        if self.job is None:
            return [make()]
        found: list[Any] = raise_own_error(partial(self.job.gather_then_decide, START), make)
        return found

    def resume_together(self, read: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Return where this rank resumes, by `read`, if all ranks resume from one step. All of them call this.

        Raises: what `read` raised; where it raised on another rank alone, an error that names that rank; ConfigError on
            every rank if two were given states of different steps; WaitTimeout naming the ranks that do not come.
        """
        if self.job is None:
            return read()
        what = "a loader's load_state_dict"
        try:
            epoch, step = read()
        except Exception as error:
            self.job.leave(error, what)
            raise
        places = [f"epoch {place[0]}, step {place[1]}" for place in self.job.all_gather(what, [epoch, step])]
        if len(set(places)) > 1:
            raise ConfigError(
                f"state is of {_on_ranks(places)}: batches would be of several steps. Load one state on all ranks"
            )
        return epoch, step


def leave_start(
    error: Exception, world_size: object, *, is_of_mesh: bool, ranks: Callable[[], Ranks] | None
) -> None:
    """Have the ranks that wait for this one at the start of a loader raise what keeps this one from it.

    world_size: as it was given. ranks: as for `open_together`.
    """
    is_in_job = bool(job_of_this_process().kind)
    reads_alone = (is_integer(world_size) and world_size == 1) or (world_size is None and not is_in_job)
    if is_of_mesh or not reads_alone:
        # Whatever is wrong with these ranks, the error at hand is what the user has to see.
        with contextlib.suppress(Exception):
            if ranks is not None or is_in_job:
                (shared_ranks() if ranks is None else ranks()).leave(error, START)


def placed(config: LoaderConfig, mesh: Any) -> LoaderConfig:
    """Return a configuration that says which rank this process is.

    mesh: see `place_in_mesh`; None where the configuration says it.
    Raises: ConfigError if both are given, if only a part is, or if none is and the process is one of several.
    """
    if mesh is not None:
        if config.rank is not None or config.world_size is not None:
            raise ConfigError("mesh is given beside rank or world_size, which it says: give one or the other")
        if config.batch_size is None and hasattr(mesh, "addressable_devices_indices_map"):
            raise ConfigError(
                "batch_sampler makes batches of any size, and a sharding lays out those of one: give batch_size"
            )
        rank, ranks = place_in_mesh(mesh, config.batch_size or 1)
        return replace(config, rank=rank, world_size=ranks)
    if config.world_size is None:
        if evidence := job_of_this_process().evidence:
            raise ConfigError(
                f"{evidence}, so this process is one of several, and nothing says which of them share each batch: give "
                "rank= and world_size=, such as rank=torch.distributed.get_rank(), "
                "world_size=torch.distributed.get_world_size() where none of them works on the same samples; mesh=, a "
                "DeviceMesh, under tensor or pipeline parallelism; or world_size=1 where each reads everything"
            )
    elif config.rank is None and config.world_size > 1:
        raise ConfigError(f"{BOTH_OR_NEITHER}: world_size is {config.world_size} and rank is left out")
    return config


def open_together(
    config: LoaderConfig,
    calls: Calls,
    as_array: Callable[[Any], NDArray[Any] | None],
    *,
    ranks: Callable[[], Ranks] | None = None,
    is_of_mesh: bool = False,
    state: Mapping[str, Any] | None = None,
) -> Agreed:
    """Open the source and plan the run as all ranks do, after all ranks were compared; all of them call this.

    config: of `placed`. calls: what the source is listed with. as_array: of the front end.
    ranks: makes those to compare; None: the ranks of this process's job, if it is in one. One rank of a plan compares
        nothing, unless it is of a mesh, along which others read the same samples.
    state: from which the run resumes; a seed that is left out is the state's.

    Raises: ConfigError on every rank if two differ, naming the ranks, the value and what it is on each; what opening
        raised; where it raised on another rank alone, an error that names that rank; WaitTimeout naming the ranks that
        do not come.
    """
    if config.seed is None and (seed := seed_of_state(state)) is not None:
        config = replace(config, seed=seed)
    drawn = secrets.randbits(_SEED_BITS)
    job, uncompared = _ranks_of(config, ranks, is_of_mesh)
    if job is None:
        if uncompared and config.seed is None:
            raise ConfigError(
                f"seed is None, and one cannot be drawn for all ranks ({uncompared}): give seed="
            )
        config = replace(config, seed=drawn) if config.seed is None else config
        others = job_of_this_process().evidence if (config.world_size or 1) == 1 else ""
        return Agreed(config, open_run(config, calls), None, not config.rank, uncompared, others)
    found: list[tuple[Source | MapDataset, dict[str, JSON]]] = []

    listed = list_once(job, config, calls)

    def describe() -> dict[str, Any]:
        source = open_source_of(config, calls, listed())
        data = describe_data(source)
        found.append((source, data))
        return {
            "values": _values_of(config, source, samples_of(source, calls), data, state, as_array),
            "place": [config.rank, config.world_size],
            "source": data_of(source).place,
            "drawn": drawn,
        }

    answer = raise_own_error(lambda part: job.gather_then_decide(START, part, _decide), describe)
    ((source, data),) = found
    if "refused" in answer:
        plan_of(config, source, samples_of(source, calls))  # raises it, unless another rank alone does
    if differs := answer.get("differs", answer.get("refused")):
        raise ConfigError(differs)
    if config.seed is None:
        config = replace(config, seed=answer["drawn"])
    opened = Opened(source, plan_of(config, source, samples_of(source, calls)))
    return Agreed(config, opened, data, job.rank == answer["reports"], job=job)


def _ranks_of(
    config: LoaderConfig, ranks: Callable[[], Ranks] | None, is_of_mesh: bool
) -> tuple[Ranks | None, str]:
    """Return the ranks to compare; or None, and why those of the plan are not compared."""
    is_alone = (config.world_size or 1) == 1
    if is_alone and not is_of_mesh:
        return None, ""
    if ranks is None:
        job = job_of_this_process()
        if job.kind:
            return shared_ranks(), ""
        reason = f"{job.remedy} before to have them compared" if job.remedy else "this process knows no other"
    else:
        if (found := ranks()).size > 1:
            return found, ""
        reason = "ranks= has this one alone"
    return None, "" if is_alone else reason


def _values_of(
    config: LoaderConfig,
    source: Source | MapDataset,
    samples: int,
    data: dict[str, JSON],
    state: object,
    as_array: Callable[[Any], NDArray[Any] | None],
) -> dict[str, JSON]:
    """Return what must be equal on all ranks, by name; less where there can be no plan."""
    values: dict[str, JSON] = {
        "seed": config.seed,
        "world_size": config.world_size,
        "epochs": config.epochs,
        "steps": config.steps,
        "policy": describe_object(config.loading_policy),
        "share": config.share,
        "keep": config.keep if config.share in (HOST, HOSTS) else None,
        "resumes at": [state.get("epoch"), state.get("step")] if isinstance(state, Mapping) else None,
        "plan.samples": samples,
        **dict(flat_values({"data": data})),
    }
    try:
        plan = plan_of(config, source, samples)
    except ConfigError as error:
        return values | {"refused": str(error)}
    pipeline = None
    if isinstance(source, Source):
        pipeline = pipeline_of(config, source, runs=False)
    described = describe_run(plan, source, pipeline, data, config=config, as_array=as_array)
    return values | {"split": describe_object(plan.split)} | dict(flat_values(described))


def _decide(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return in what the ranks differ; or the seed of all, and which of them reports. ranks: what each described."""
    values = [rank["values"] for rank in ranks]
    differing = [
        f"{name} is {_on_ranks([f'{value[name]!r:.200}' for value in values])}"
        for name in values[0]
        if all(name in value for value in values) and any(value[name] != values[0][name] for value in values)
    ]
    if differing:
        if len(differing) > _SHOWN:
            differing[_SHOWN:] = [f"{len(differing) - _SHOWN} more values differ"]
        sources = [rank["source"] for rank in ranks]
        if len(set(sources)) > 1:
            differing.append(f"source is {_on_ranks(sources)}")
        return {
            "differs": f"the ranks of this job would not read one run: {'; '.join(differing)}. Give all ranks the same "
            "arguments, and a data set that does not change while they start; or ranks=penstock.ranks.alone to loaders "
            "of ranks that do not train together"
        }
    if refused := [rank for rank, value in enumerate(values) if "refused" in value]:
        by = f"{named_ranks(refused)} of {len(ranks)}: " if len(refused) < len(ranks) else ""
        return {"refused": by + values[refused[0]]["refused"]}
    places = [rank["place"][0] for rank in ranks]
    missing = sorted(set(range(ranks[0]["place"][1])) - set(places))
    if missing:
        return {
            "differs": f"nothing reads what data-parallel {named_ranks(missing)} of {ranks[0]['place'][1]} should: "
            f"rank is {_on_ranks(list(map(str, places)))}. Give each rank its own rank=, or mesh="
        }
    return {"drawn": ranks[0]["drawn"], "reports": places.index(0)}


def _on_ranks(values: Sequence[str]) -> str:
    """Return "1 on ranks 0, 2 and 5 on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    *most, last = [f"{value} on {named_ranks(those)}" for value, those in ranks.items()]
    return f"{', '.join(most)} and {last}" if most else last
