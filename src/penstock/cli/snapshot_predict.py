"""`penstock snapshots predict`: what saving will cost, with and without a burst buffer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cli.options import (
    given,
    parsed,
    parsed_amount,
    parsed_count,
    parsed_names,
    parsed_share,
    parsed_size,
)
from penstock.cli.output import Table, add_command, add_output_options, show
from penstock.cli.snapshot_files import open_store
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_count, format_rate, format_seconds, parse_rate, parse_seconds

if TYPE_CHECKING:
    from penstock.machine import Machine
    from penstock.simulate.saving import FastTier, PredictedSaves, SavePlan

_EPILOG = """\
MACHINE is what penstock calibrate writes, with source.write and the disks' rates added, or a scenario.
A drain cap of "none" lets drains write as fast as they can.

examples:
  penstock snapshots predict machine.toml --state "60 GB" --every 1000 --steps 10000 --step-seconds 250ms
  penstock snapshots predict machine.toml --from runs/a --step-seconds 250ms --drain-cap "none,100 MB/s" --json

JSON: results[], one for each alternative, with fast (null: none), drain_bytes_per_second (null: no cap), run_seconds,
end_seconds, blocked_seconds, slowed_seconds, durable_seconds and drained_seconds (of the save that takes longest),
is_fast_sufficient, peak_fast_bytes, sufficient_bytes (the space in which every save finds its place), saves[]
(blocked_by_previous_seconds: of blocked_seconds, until the save before was done);
notes (what was taken for granted); advice.
"""
#: Alternatives that lose the same share of the run, to a hundredth of it, are equally quick for the training.
_EQUAL_SHARE = 0.01


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "predict",
        _run,
        "predict what saving costs the training, with and without a burst buffer",
        "Predict how long saves block a training and when they are durable; advise on a fast tier.",
        _EPILOG,
    )
    parser.add_argument("machine", metavar="MACHINE", help="a .toml file, or scenario1 to scenario4")
    parser.add_argument("--ranks", metavar="N", help="processes of the job, instead of the machine's")
    run = parser.add_argument_group("the training")
    run.add_argument("--state", metavar="SIZE", help="bytes that each save copies, all ranks together")
    run.add_argument("--every", metavar="STEPS", help="steps from one save to the next")
    run.add_argument("--steps", metavar="N", help="steps of the run (ten saves)")
    run.add_argument("--step-seconds", metavar="TIME", required=True, help="time of a step without saves")
    run.add_argument(
        "--read", metavar="RATE", help="rate at which each rank reads from the store meanwhile (nothing)"
    )
    stored = parser.add_argument_group("how snapshots are stored")
    stored.add_argument(
        "--from",
        dest="store",
        metavar="DIR",
        help="a snapshot store from which the state's size, the steps between saves and the shares are taken",
    )
    stored.add_argument(
        "--baseline-share", metavar="SHARE", help="size of a baseline, relative to the state (1)"
    )
    stored.add_argument(
        "--delta-share", metavar="SHARE", help="size of a delta, relative to the state (as a baseline)"
    )
    stored.add_argument(
        "--encode", metavar="RATE", help="rate at which a rank encodes (the tiers are slower)"
    )
    stored.add_argument("--snap-dis", metavar="D", default="10", help="saves to a baseline (%(default)s)")
    stored.add_argument("--keep", metavar="N", default="5", help="latest snapshots that stay (%(default)s)")
    tier = parser.add_argument_group("the fast tier")
    tier.add_argument("--fast", metavar="NAMES", help="storage classes of the machine (each local disk)")
    tier.add_argument("--fast-space", metavar="SIZE", help="space for snapshots on it (all of it)")
    tier.add_argument(
        "--drain-cap",
        metavar="RATES",
        default="none",
        help="caps on the rate of drains, with commas (%(default)s)",
    )
    add_output_options(parser, plot=False)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What options or an existing store say of snapshots; None: neither does."""

    state_bytes: int | None = None
    every_steps: int | None = None
    baseline_share: float | None = None
    delta_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A fast tier or none, what is predicted with it, and how large it has to be for all saves."""

    fast: FastTier | None
    predicted: PredictedSaves
    sufficient_bytes: int | None

    @property
    def name(self) -> str:
        return "none" if self.fast is None else self.fast.name

    @property
    def cap(self) -> float | None:
        capped = self.fast is not None and self.fast.drain_bytes_per_second < math.inf
        return self.fast.drain_bytes_per_second if self.fast and capped else None

    @property
    def lost_share(self) -> float:
        """Return which share of the run the training loses to saves and drains."""
        predicted = self.predicted
        return (predicted.blocked_seconds + predicted.slowed_seconds) / predicted.run_seconds

    @property
    def durable_seconds(self) -> float:
        return max(save.durable_seconds for save in self.predicted.saves)

    @property
    def drained_seconds(self) -> float | None:
        """Return after how long the last of the drained snapshots is on the shared store."""
        drained = [one.drained_seconds for one in self.predicted.saves if one.drained_seconds is not None]
        return max(drained, default=None)

    @property
    def saves_on_fast(self) -> int:
        return 0 if self.fast is None else sum(save.tier == 0 for save in self.predicted.saves)


def _run(options: argparse.Namespace) -> None:
    from penstock.measure.scenarios import open_machine

    machine = open_machine(options.machine)
    if options.ranks is not None:
        machine = replace(machine, ranks=parsed_count("--ranks", options.ranks))
    plan = _plan(options)
    alternatives = [_predicted(machine, plan, fast) for fast in _fast_tiers(options, machine)]
    advice, notes = _advice(alternatives), _assumed(machine, plan, alternatives)
    data = {"results": list(map(_values, alternatives)), "notes": notes, "advice": advice}
    show(options, data, [_table(plan, machine, alternatives)], [*notes, advice])


def _plan(options: argparse.Namespace) -> SavePlan:
    from penstock.policy.retention import Keep
    from penstock.simulate.saving import SavePlan

    written = {
        "state_bytes": given(options, "state", parsed_size),
        "every_steps": given(options, "every", parsed_count),
        "baseline_share": given(options, "baseline_share", parsed_share),
        "delta_share": given(options, "delta_share", parsed_share),
    }
    found = _Stored() if options.store is None else _stored_in(options.store)
    known = replace(found, **{name: value for name, value in written.items() if value is not None})  # type: ignore[arg-type]
    for option, value in (("--state", known.state_bytes), ("--every", known.every_steps)):
        if value is None:
            raise ConfigError(f"{option} is missing: give it, or a store with two snapshots as --from")
    assert known.state_bytes is not None and known.every_steps is not None  # noqa: PT018, as was just checked
    every = known.every_steps
    last_step = given(options, "steps", parsed_count) or 10 * every
    if last_step < every:
        raise ConfigError(
            f"--steps is {last_step:,}; a run that saves every {every:,} steps has at least as many"
        )
    baseline_share = 1.0 if known.baseline_share is None else known.baseline_share
    return SavePlan(
        range(every, last_step + 1, every),
        last_step,
        parsed_amount("--step-seconds", parse_seconds, options.step_seconds),
        known.state_bytes,
        Keep(last=parsed_count("--keep", options.keep)),
        snap_dis=parsed_count("--snap-dis", options.snap_dis),
        baseline_share=baseline_share,
        delta_share=baseline_share if known.delta_share is None else known.delta_share,
        encode_bytes_per_second=given(options, "encode", parsed_amount, parse_rate) or math.inf,
        read_bytes_per_second=given(options, "read", parsed_amount, parse_rate) or 0.0,
    )


def _stored_in(folder: str) -> _Stored:
    """Return what the snapshots of a store say: their latest state, and the means of their steps and shares.

    Raises: ConfigError if there is no store, or no snapshot in it that can be read.
    """
    with open_store(folder) as store:
        listed = [one for one in store.list() if one.condition == "intact" and one.raw_bytes]
    if not listed:
        raise ConfigError(f"no snapshot is there: {folder} says nothing of what another would take")
    steps = sorted(one.step for one in listed)
    shares: dict[bool, list[float]] = {True: [], False: []}
    for one in listed:
        shares[one.reference_step is None].append(one.stored_bytes / one.raw_bytes)
    baseline, delta = (
        sum(shares[is_baseline]) / len(shares[is_baseline]) if shares[is_baseline] else None
        for is_baseline in (True, False)
    )
    every = round((steps[-1] - steps[0]) / (len(steps) - 1)) if len(steps) > 1 else None
    return _Stored(listed[-1].raw_bytes, every, baseline, delta)


def _fast_tiers(options: argparse.Namespace, machine: Machine) -> list[FastTier | None]:
    """Return the alternatives that are asked for: without a fast tier, then each tier with each cap."""
    from penstock.simulate.saving import FastTier

    if options.fast is None:
        names = [each.name for each in machine.storage[1:] if not each.is_memory]
    else:
        names = parsed_names(options.fast, "--fast")
        for each in machine.storage:
            if each.name in names and each.is_memory:
                raise ConfigError(
                    f"--fast names {each.name}, which is memory: a loss of power takes the snapshots there; "
                    "name a disk of each rank, as [[storage]] with place and path"
                )
    space = given(options, "fast_space", parsed_size)
    caps = [
        math.inf if cap == "none" else parsed("--drain-cap", parse_rate, cap)
        for cap in parsed_names(options.drain_cap, "--drain-cap")
    ]
    return [None, *(FastTier(name, space, cap) for name in names for cap in caps)]


def _predicted(machine: Machine, plan: SavePlan, fast: FastTier | None) -> _Alternative:
    from penstock.simulate.saving import predict_saves

    predicted = predict_saves(machine, plan, fast)
    if fast is None:
        return _Alternative(fast, predicted, None)
    # A tier as large as all snapshots has space for each.
    spaces = (plan.state_bytes * states for states in range(1, len(plan.steps) + 1))
    sufficient = (
        nbytes
        for nbytes in spaces
        if predict_saves(machine, plan, replace(fast, capacity_bytes=nbytes)).is_fast_sufficient
    )
    return _Alternative(fast, predicted, next(sufficient))


def _assumed(machine: Machine, plan: SavePlan, alternatives: Sequence[_Alternative]) -> list[str]:
    """Return what is taken for granted where the machine or the options are silent."""
    notes = []
    if machine.source.write is None:
        notes.append("source.write is not given: the shared store is taken to write as fast as it reads.")
    named = {each.name for each in alternatives}
    for each in machine.storage[1:]:
        if each.name in named and each.write is None:
            notes.append(f"write of {each.name} is not given: it is taken to write as fast as it reads.")
    if plan.baseline_share == plan.delta_share == 1:
        notes.append("Snapshots are taken to be stored as they are: --from DIR or the shares say better.")
    return notes


def _advice(alternatives: Sequence[_Alternative]) -> str:
    """Name what costs the training least and, of those that cost as little, what is durable first."""
    least = min(each.lost_share for each in alternatives)
    equal = [each for each in alternatives if each.lost_share <= least + _EQUAL_SHARE]
    best = min(equal, key=lambda each: each.durable_seconds)
    if best.fast is None:
        what = "Save to the shared store directly" if len(alternatives) > 1 else "Without a fast tier"
    else:
        cap = f", drained at most at {format_rate(best.cap)}" if best.cap else ""
        what = f"Save to {best.name} first{cap}"
    text = (
        f"{what}: the training loses {100 * best.lost_share:.1f} % of its time to saves, and each snapshot is durable "
        f"within {format_seconds(best.durable_seconds)}"
    )
    saves = len(best.predicted.saves)
    if best.fast is not None and best.saves_on_fast < saves:
        assert best.sufficient_bytes is not None, "it has a fast tier"
        text += (
            f"; {saves - best.saves_on_fast:,} of {format_count(saves, 'save')} find no space on {best.name}, "
            f"where {format_bytes(best.sufficient_bytes)} would do for all"
        )
    return f"{text}."


def _values(each: _Alternative) -> dict[str, Any]:
    predicted = each.predicted
    return {
        "fast": None if each.fast is None else each.fast.name,
        "drain_bytes_per_second": each.cap,
        "run_seconds": predicted.run_seconds,
        "end_seconds": predicted.end_seconds,
        "blocked_seconds": predicted.blocked_seconds,
        "slowed_seconds": predicted.slowed_seconds,
        "durable_seconds": each.durable_seconds,
        "drained_seconds": each.drained_seconds,
        "is_fast_sufficient": predicted.is_fast_sufficient,
        "peak_fast_bytes": predicted.peak_fast_bytes,
        "sufficient_bytes": each.sufficient_bytes,
        "saves": list(map(asdict, predicted.saves)),
    }


def _table(plan: SavePlan, machine: Machine, alternatives: Sequence[_Alternative]) -> Table:
    saves = len(plan.steps)
    return Table(
        f"{format_count(saves, 'save')} of {format_bytes(plan.state_bytes)}, every {plan.steps[0]:,} steps, "
        f"{format_count(machine.ranks, 'rank')}",
        [
            "fast tier", "drain cap", "blocked", "reads slowed", "of the run", "durable within",
            "drained within", "saves on it", "most on it", "sufficient",
        ],
        [
            [
                each.name,
                "-" if each.cap is None else format_rate(each.cap),
                format_seconds(each.predicted.blocked_seconds),
                format_seconds(each.predicted.slowed_seconds),
                f"{100 * each.lost_share:.1f} %",
                format_seconds(each.durable_seconds),
                "-" if each.drained_seconds is None else format_seconds(each.drained_seconds),
                "-" if each.fast is None else f"{each.saves_on_fast:,} of {saves:,}",
                "-" if each.fast is None else format_bytes(each.predicted.peak_fast_bytes),
                "-" if each.sufficient_bytes is None else format_bytes(each.sufficient_bytes),
            ]
            for each in alternatives
        ],
    )  # fmt: skip
