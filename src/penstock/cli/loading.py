"""`penstock simulate loading`: a whole job's loading under every policy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.options import POLICIES, check_memory, parsed_names
from penstock.cli.output import Table, add_command, add_output_options, progress, show
from penstock.cli.scenario import add_scenario_options, scenario_from
from penstock.errors import ConfigError
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.measure.policies import PolicyRuns
    from penstock.policy.loading import LoadingPolicy
    from penstock.simulate.scenario import Scenario

_DESCRIPTION = """\
Predicts a job's loading on all ranks under each policy: how long it runs and waits, and from where its samples come.
The loaders' own schedulers run in virtual time. See docs/howto/compare-loading-policies.md; the published tables are
those of penstock paper.
"""
_EPILOG = """\
examples:
  penstock simulate loading scenario1 --repeats 6
  penstock simulate loading scenario4 --policies lower-bound,staging,cover,mine:MyPolicy --plot policies.png
  penstock simulate loading cats.toml --scaling 1,2,4,8 --json

JSON: scenario, repeats, and results[] of policy, ranks, is_runnable (by the loader of this version, else
not_runnable_reason), run_seconds (mean of the repeats, null where the policy
cannot run: see reason), run_seconds_by_repeat[], spread_seconds, reason; and of the first seed initial_stall_seconds,
stall_seconds_of_ranks[], store_read_bytes, data_set_bytes, shares{}.
"""


def add(commands: Any) -> None:
    summary = "a whole job's loading under every policy"
    parser = add_command(commands, "loading", _run, summary, _DESCRIPTION, _EPILOG)
    add_scenario_options(parser)
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"loading policies, with commas: {POLICIES}; your own as module:Class (all)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="K",
        help="repeat K times, with seeds from --seed on (%(default)s)",
    )
    parser.add_argument("--scaling", metavar="RANKS", help="strong scaling over these numbers, with commas")
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    from penstock.loader.prediction import prepare_clock
    from penstock.measure.own_policy import find_policy
    from penstock.measure.plot_loading import draw_policies, draw_scaling
    from penstock.measure.policies import run_policies
    from penstock.simulate.policies import POLICY_NAMES

    scenario = scenario_from(options)
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}; at least 1 is needed")
    names = POLICY_NAMES if options.policies is None else parsed_names(options.policies, "--policies")
    policies = [find_policy(name) for name in names]
    check_memory("samples", scenario.samples, 8 * (1 + scenario.epochs))  # sizes, and what all ranks read
    ranks = _ranks(options.scaling)
    prepare_clock(len(policies) * sum(map(scenario.plan().reads, range(scenario.ranks))))
    total = len(policies) * options.repeats * max(1, len(ranks))
    with progress("simulating", total) as done:
        runs = run_policies(scenario, policies, repeats=options.repeats, ranks=ranks, done=done)
    draw = draw_scaling if len(ranks) > 1 else draw_policies
    show(
        options,
        _as_json(options, scenario, runs),
        _tables(scenario, policies, runs),
        [*_notes(runs), *_of_loader(runs)],
        lambda: draw(scenario.name, runs),
    )


def _ranks(written: str | None) -> list[int]:
    if written is None:
        return []
    try:
        ranks = [int(each) for each in written.split(",")]
    except ValueError:
        ranks = [0]
    if min(ranks) < 1:
        raise ConfigError(f"--scaling is {written!r}; it is numbers of ranks with commas, as in 1,2,4,8")
    return ranks


def _tables(scenario: Scenario, policies: Sequence[LoadingPolicy], runs: Sequence[PolicyRuns]) -> list[Table]:
    tables = []
    for begin in range(0, len(runs), len(policies)):
        rows = runs[begin : begin + len(policies)]
        lower = next((row.mean_seconds for row in rows if row.policy == "lower-bound"), None)
        columns = [
            "policy", "run (s)", "ratio", "loads (s)", "waits (s)", "store", "tier", "peer", "data",
        ]  # fmt: skip
        title = (
            f"{scenario.name}: {format_count(rows[0].ranks, 'rank')}, {format_count(scenario.samples, 'sample')}, "
            f"{format_count(scenario.epochs, 'epoch')}"
        )
        tables.append(Table(title, columns, [_cells(row, lower) for row in rows]))
    return tables


def _cells(row: PolicyRuns, lower: float | None) -> list[str]:
    if row.result is None or row.mean_seconds is None:
        return [row.policy, "N/A", *[""] * 7]
    spread = f" ± {row.spread_seconds:,.2f}" if row.spread_seconds is not None else ""
    shares = row.shares()
    place = {
        name: shares[f"staged from {staged}"] + shares[name]
        for name, staged in (("store", "the store"), ("tier", "a tier"), ("peer", "a peer"))
    }
    # The lower bound has every sample at once; where it came from is not asked.
    counted = [f"{100 * place[name]:.1f}" for name in place] if row.policy != "lower-bound" else [""] * 3
    return [
        row.policy,
        f"{row.mean_seconds:,.2f}{spread}",
        f"{row.mean_seconds / lower:.3f}" if lower else "",
        _seconds(row.result.initial_stall_seconds),
        _seconds(row.result.stall_seconds.max()),
        *counted,
        f"{row.result.store_bytes.sum() / row.total_bytes:.2f}",
    ]


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.2f}"


def _notes(runs: Sequence[PolicyRuns]) -> list[str]:
    notes = [
        "ratio: run time over the lower bound's. loads: before training. waits: of the rank that waits most, for "
        "samples, loading included. store, tier, peer: where consumed samples came from, in %. data: bytes "
        "read from the shared store, for tiers too, over the data set's."
    ]
    notes += dict.fromkeys(f"N/A: {row.reason}" for row in runs if row.reason)
    if any(row.policy.endswith("+local") for row in runs):
        notes.append(
            "+local changes which rank reads which sample of a batch: gradients do not notice, statistics over a local "
            "batch (BatchNorm) do"
        )
    return notes


def _of_loader(runs: Sequence[PolicyRuns]) -> list[str]:
    """Say for each number of ranks which policy is the fastest, and which of those that the loader runs today."""
    from penstock.policy.runnable import LOADER_POLICIES

    notes = []
    for ranks in dict.fromkeys(row.ranks for row in runs):
        rows = [
            row for row in runs if row.ranks == ranks and row.mean_seconds and row.policy != "lower-bound"
        ]
        if not rows:
            continue
        fastest = min(rows, key=_mean)
        runnable = [row for row in rows if row.not_runnable_reason is None]
        note = f"{format_count(ranks, 'rank')}: the fastest is {fastest.policy}, {_mean(fastest):,.2f} s; "
        if runnable:
            best = min(runnable, key=_mean)
            note += f"of these the loader of this version runs {best.policy}, {_mean(best):,.2f} s"
        else:
            reasons = {row.not_runnable_reason for row in rows if row.policy in LOADER_POLICIES}
            reasons = reasons or {fastest.not_runnable_reason}
            note += f"the loader of this version runs none of these: {'; '.join(sorted(map(str, reasons)))}"
        notes.append(note)
    return notes


def _mean(row: PolicyRuns) -> float:
    return row.mean_seconds or 0.0


def _as_json(options: argparse.Namespace, scenario: Scenario, runs: Sequence[PolicyRuns]) -> dict[str, Any]:
    entries = []
    for row in runs:
        entry: dict[str, Any] = {
            "policy": row.policy,
            "ranks": row.ranks,
            "is_runnable": row.not_runnable_reason is None,
            "not_runnable_reason": row.not_runnable_reason,
            "run_seconds": row.mean_seconds,
            "run_seconds_by_repeat": list(row.run_seconds),
            "spread_seconds": row.spread_seconds,
            "reason": row.reason or None,
        }
        if row.result is not None:
            result = row.result
            entry |= {
                "initial_stall_seconds": result.initial_stall_seconds,
                "stall_seconds_of_ranks": result.stall_seconds.tolist(),
                "store_read_bytes": float(result.store_bytes.sum()),
                "data_set_bytes": row.total_bytes,
                "shares": row.shares(),
            }
        entries.append(entry)
    return {"scenario": scenario.name, "repeats": options.repeats, "results": entries}
