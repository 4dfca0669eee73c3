"""What a sweep says: which machine to buy, and the table that it was chosen from."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from penstock.errors import ConfigError
from penstock.measure.sweep import LOWER_BOUND, Outcome, Point, Sweep, Task
from penstock.measure.sweep_ranges import Prices
from penstock.validate import check_wait

_ROUNDING = 1e-9
_PRICE_DIGITS = 9
#: What differs only behind these is nothing that anybody pays.
_MOST_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one point, judged.

    lower_bound_seconds: of the same number of ranks; None where it could not be computed.
    slowdown: by which share the run is longer than it; None where either is not known.
    price: of all hosts; None where no price was given.
    """

    point: Point
    policy: str
    outcome: Outcome
    lower_bound_seconds: float | None
    slowdown: float | None
    price: float | None

    @property
    def not_runnable_reason(self) -> str | None:
        """Why the loader of this version does not run it; None where it does."""
        return self.outcome.why_not_run or self.outcome.reason or None


@dataclass(frozen=True, slots=True)
class Answer:
    """What to buy.

    rows: every policy at every point.
    within: how much longer than the lower bound a run may take, as a share.
    deadline_seconds: how long it may take at all; inf for any time.
    sufficient: the rows that meet both, in the order of `rows`.
    cheapest: of the sufficient ones; of equally cheap ones the fastest. None without prices, or where none suffices.
    least: without prices, the sufficient rows of which nothing can be taken away: no other sufficient one has at most
        as many ranks and as much of everything.
    closest: where none suffices, the one that comes nearest to the lower bound, of those that meet the deadline, if
        any does. None where some suffice, or nothing ran.
    front: with prices, the rows that no other one beats in both price and run time, from the cheapest to the fastest.
    fastest: of all rows; None where nothing ran.
    of_loader: the answer from those rows alone that the loader of this version runs; None where it runs all.
    """

    rows: tuple[Row, ...]
    within: float
    deadline_seconds: float
    sufficient: tuple[Row, ...]
    cheapest: Row | None
    least: tuple[Row, ...]
    closest: Row | None
    front: tuple[Row, ...]
    fastest: Row | None
    of_loader: Answer | None = None


def judge(
    outcomes: Mapping[Task, Outcome],
    *,
    within: float,
    prices: Prices | None = None,
    deadline_seconds: float = math.inf,
) -> Answer:
    """Choose from a sweep's outcomes.

    within: 0.05 allows runs 5 % longer than the lower bound of as many ranks.
    prices: None where nobody said what anything costs.

    Raises: ConfigError if within or deadline_seconds is negative or not a number.
    """
    if not within >= 0:
        raise ConfigError(f"within is {within!r}; it is a share of zero or more")
    check_wait("deadline_seconds", deadline_seconds)
    bounds = {
        task.point.ranks: outcome.run_seconds
        for task, outcome in outcomes.items()
        if task.policy == LOWER_BOUND
    }
    rows = tuple(
        _row(task, outcome, bounds.get(task.point.ranks), prices)
        for task, outcome in outcomes.items()
        if task.policy != LOWER_BOUND
    )
    answer = _choose(rows, within, prices is not None, deadline_seconds)
    runnable = tuple(row for row in rows if row.outcome.why_not_run is None)
    if len(runnable) == len(rows):
        return answer
    return replace(answer, of_loader=_choose(runnable, within, prices is not None, deadline_seconds))


def _choose(rows: tuple[Row, ...], within: float, priced: bool, deadline_seconds: float) -> Answer:
    in_time = [row for row in rows if _seconds(row) <= deadline_seconds]
    # A run at the very edge is within: 1.05 / 1 - 1 is above 0.05 by a hair.
    sufficient = tuple(
        row for row in in_time if row.slowdown is not None and row.slowdown <= within + _ROUNDING
    )
    candidates = [row for row in in_time or rows if row.slowdown is not None]
    return Answer(
        rows,
        within,
        deadline_seconds,
        sufficient,
        cheapest=min(sufficient, key=_price_then_seconds, default=None) if priced else None,
        least=tuple(row for row in sufficient if _is_least(row, sufficient)) if not priced else (),
        closest=None if sufficient else min(candidates, key=_slowdown, default=None),
        front=_front(rows) if priced else (),
        fastest=min((row for row in rows if row.outcome.run_seconds is not None), key=_seconds, default=None),
    )


def _row(task: Task, outcome: Outcome, bound: float | None, prices: Prices | None) -> Row:
    slowdown = None
    if outcome.run_seconds is not None and bound:
        # Rounding of a sum of many steps may put a run below its bound by a hair.
        slowdown = max(0.0, outcome.run_seconds / bound - 1.0)
    price = None if prices is None else prices.of(task.point)
    return Row(task.point, task.policy, outcome, bound, slowdown, price)


def _seconds(row: Row) -> float:
    return math.inf if row.outcome.run_seconds is None else row.outcome.run_seconds


def _slowdown(row: Row) -> float:
    return math.inf if row.slowdown is None else row.slowdown


def _price(row: Row) -> float:
    return math.inf if row.price is None else row.price


def _price_then_seconds(row: Row) -> tuple[float, float]:
    return _price(row), _seconds(row)


def _is_least(row: Row, sufficient: tuple[Row, ...]) -> bool:
    def needs(row: Row) -> tuple[int, ...]:
        point = row.point
        return point.ranks, point.staging_bytes, point.memory_bytes, point.local_disk_bytes

    own = needs(row)
    for other in sufficient:
        others = needs(other)
        if others == own and _seconds(other) < _seconds(row):
            return False
        if others != own and all(less <= more for less, more in zip(others, own, strict=True)):
            return False
    return True


def _front(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    front: list[Row] = []
    for row in sorted((row for row in rows if row.outcome.run_seconds is not None), key=_price_then_seconds):
        if not front or _seconds(row) < _seconds(front[-1]):
            front.append(row)
    return tuple(front)


def price_decimals(rows: Iterable[Row], least: int) -> int:
    """Return with how many decimals, at least so many, prices that differ are written differently, and none as 0."""
    prices = {row.price for row in rows if row.price}
    # Beyond nine digits it is the sums' rounding that differs.
    different = len({f"{price:.{_PRICE_DIGITS}g}" for price in prices})
    for decimals in range(least, _MOST_DECIMALS):
        texts = {f"{price:.{decimals}f}" for price in prices}
        if len(texts) >= different and all(map(float, texts)):
            return decimals
    return _MOST_DECIMALS


def all_values(answer: Answer) -> list[dict[str, Any]]:
    """Return the rows as plain values, every name with its unit: lines of the Parquet file, objects of the JSON."""
    sufficient, front = frozenset(answer.sufficient), frozenset(answer.front)
    return [_values(row, row in sufficient, row in front) for row in answer.rows]


def _values(row: Row, is_sufficient: bool, is_on_front: bool) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "ranks": row.point.ranks,
        "staging_bytes": row.point.staging_bytes,
        "memory_bytes": row.point.memory_bytes,
        "local_disk_bytes": row.point.local_disk_bytes,
        "policy": row.policy,
        "is_runnable": row.not_runnable_reason is None,
        "not_runnable_reason": row.not_runnable_reason,
        "status": outcome.status,
        "run_seconds": outcome.run_seconds,
        "lower_bound_seconds": row.lower_bound_seconds,
        "slowdown": row.slowdown,
        "is_sufficient": is_sufficient,
        "price": row.price,
        "is_on_front": is_on_front,
        "initial_stall_seconds": outcome.initial_stall_seconds,
        "mean_stall_seconds": outcome.stall_seconds,
        "longest_stall_seconds": outcome.longest_stall_seconds,
        "store_reads_share": outcome.store_reads_share,
        "store_bytes": outcome.store_bytes,
        "took_seconds": outcome.took_seconds,
        "reason": outcome.reason,
    }


def answer_values(answer: Answer, sweep: Sweep) -> dict[str, Any]:
    """Return an answer as JSON says it."""

    rows = all_values(answer)
    of_row = dict(zip(answer.rows, rows, strict=True))
    bounds = {row.point.ranks: row.lower_bound_seconds for row in answer.rows}
    return {
        "penstock_version": version("penstock"),
        "scenario": sweep.scenario.name,
        "within": answer.within,
        "deadline_seconds": None if math.isinf(answer.deadline_seconds) else answer.deadline_seconds,
        "lower_bounds": [
            {"ranks": ranks, "run_seconds": seconds} for ranks, seconds in sorted(bounds.items())
        ],
        **_chosen(answer, of_row),
        "front": [of_row[row] for row in answer.front],
        "of_loader": None if answer.of_loader is None else _chosen(answer.of_loader, of_row),
        "results": rows,
    }


def _chosen(answer: Answer, of_row: Mapping[Row, dict[str, Any]]) -> dict[str, Any]:
    return {
        "cheapest": None if answer.cheapest is None else of_row[answer.cheapest],
        "least": [of_row[row] for row in answer.least],
        "closest": None if answer.closest is None else of_row[answer.closest],
        "fastest": None if answer.fastest is None else of_row[answer.fastest],
    }


#: Columns of the Parquet file that are no floating-point numbers.
_INTEGERS = [
    "ranks", "staging_bytes", "memory_bytes", "local_disk_bytes", "samples", "batch_size", "epochs",
    "seed",
]  # fmt: skip
_TEXTS = ["policy", "not_runnable_reason", "status", "reason", "scenario", "penstock_version"]


def parquet_of(answer: Answer, sweep: Sweep) -> bytes:
    """Return a Parquet file with one line per row; the scenario's text is in the metadata of its schema.

    Raises: ModuleNotFoundError without pyarrow (penstock[study]).
    """
    import pyarrow as pa
    from pyarrow import parquet

    scenario = sweep.scenario
    common = {
        "scenario": scenario.name,
        "samples": scenario.samples,
        "batch_size": scenario.batch_size,
        "epochs": scenario.epochs,
        "seed": scenario.seed,
        "penstock_version": version("penstock"),
    }
    rows = [{**values, **common} for values in all_values(answer)]
    kinds = dict.fromkeys(_INTEGERS, pa.int64()) | dict.fromkeys(_TEXTS, pa.string())
    columns = [
        (name, kinds.get(name, pa.bool_() if name.startswith("is_") else pa.float64())) for name in rows[0]
    ]
    schema = pa.schema(columns, metadata={"penstock.scenario": scenario.to_toml()})
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return file.getvalue()
