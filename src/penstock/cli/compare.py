"""`penstock compare`: a recorded run over its prediction."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_amount
from penstock.cli.output import Table, add_command, add_output_options, show

if TYPE_CHECKING:
    from penstock.measure.compare import EpochPair, RunComparison

#: Waiting of less than this share of the run gets no line of its own.
_WORTH_A_LINE = 0.001
#: Stall of less than this share of the run, predicted and measured, is too little to judge a prediction by.
_LEAST_STALL = 0.01


def add_compare(commands: Any) -> None:
    parser = add_command(
        commands,
        "compare",
        _compare,
        "compare a recorded run with its prediction",
        "Predict a run that a loader recorded with trace=, and compare stall by epoch and cause.",
        "Example: penstock compare run.trace --plot compare.png\n"
        "JSON: results[], one for each epoch; run, stall, stall_by_cause{} of all; see docs/reference/plan-command.md.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="trace that a loader recorded")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="predict it on this machine")
    parser.add_argument(
        "--step-seconds", metavar="TIME", help="predict it with steps of this time, as in 100ms"
    )
    add_output_options(parser)


def _compare(options: argparse.Namespace) -> None:
    from penstock.measure.compare import compare
    from penstock.measure.plot_compare import draw_comparison
    from penstock.units import parse_seconds

    step_seconds = given(options, "step_seconds", parsed_amount, parse_seconds)
    comparison = compare(options.trace, machine=options.machine, step_seconds=step_seconds)
    notes = [*_notes(comparison), *comparison.notes]
    show(options, _values(comparison), [_table(comparison)], notes, lambda: draw_comparison(comparison))


def _values(comparison: RunComparison) -> dict[str, Any]:
    predicted_run, measured_run = comparison.run_seconds
    predicted, measured = comparison.stall_seconds

    def pair(predicted: float, measured: float) -> dict[str, Any]:
        return {
            "predicted_seconds": predicted,
            "measured_seconds": measured,
            "difference_of_run": _share(predicted - measured, measured_run),
        }

    def epoch(each: EpochPair) -> dict[str, Any]:
        return {
            "epoch": each.epoch,
            "steps": each.measured.steps,
            "stall": pair(each.predicted.stall_seconds, each.measured.stall_seconds),
            "stall_by_cause": {
                cause: pair(each.predicted.stall_by_cause[cause], each.measured.stall_by_cause[cause])
                for cause in each.measured.stall_by_cause
            },
            "own": pair(each.predicted.own_seconds, each.measured.own_seconds),
        }

    return {
        "run": pair(predicted_run, measured_run),
        "stall": {**pair(predicted, measured), "difference_of_stall": _share(predicted - measured, measured)},
        "stall_by_cause": {cause: pair(*seconds) for cause, seconds in comparison.causes.items()},
        "results": [epoch(each) for each in comparison.epochs],
        "notes": list(comparison.notes),
    }


def _table(comparison: RunComparison) -> Table:
    run_seconds = comparison.run_seconds[1]

    def line(name: str, predicted: float, measured: float) -> list[str]:
        share = _share(predicted - measured, run_seconds)
        return [
            name,
            f"{predicted:.3f}",
            f"{measured:.3f}",
            f"{predicted - measured:+.3f}",
            "" if share is None else f"{100 * share:+.2f} %",
        ]

    def block(
        name: str, pair: tuple[float, float], causes: dict[Any, tuple[float, float]]
    ) -> list[list[str]]:
        text = [
            line(f"  {cause}", *seconds)
            for cause, seconds in causes.items()
            if max(seconds) >= _WORTH_A_LINE * run_seconds
        ]
        return [line(name, *pair), *text]

    rows = []
    for each in comparison.epochs:
        one, other = each.predicted, each.measured
        causes = {
            cause: (one.stall_by_cause[cause], other.stall_by_cause[cause]) for cause in other.stall_by_cause
        }
        rows += block(f"epoch {each.epoch}", (one.stall_seconds, other.stall_seconds), causes)
    rows += block("all epochs", comparison.stall_seconds, dict(comparison.causes))
    columns = ["stall, seconds", "predicted", "measured", "difference", "of the run"]
    return Table("Predicted against measured", columns, rows)


def _notes(comparison: RunComparison) -> list[str]:
    predicted, measured = comparison.stall_seconds
    predicted_run, measured_run = comparison.run_seconds
    of_run, of_stall = _share(predicted - measured, measured_run), _share(predicted - measured, measured)
    text = f"Stall: predicted {predicted:.2f} s, measured {measured:.2f} s"
    if max(predicted, measured) < _LEAST_STALL * measured_run:
        text += f"; too little to judge, below {100 * _LEAST_STALL:g} % of the run"
    elif measured < _LEAST_STALL * measured_run:
        # A share of next to nothing would say nothing; that far more was predicted does.
        text += f"; off by {100 * (of_run or 0.0):+.2f} % of the run"
    elif of_run is not None and of_stall is not None:
        text += f"; off by {100 * of_stall:+.1f} % of the stall, {100 * of_run:+.2f} % of the run"
    return [f"{text}.", f"Run: predicted {predicted_run:.2f} s, measured {measured_run:.2f} s."]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
