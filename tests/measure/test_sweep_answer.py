"""What a sweep recommends, on outcomes that can be checked by hand."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.measure.sweep import LOWER_BOUND, Outcome, Point, Sweep, Task
from penstock.measure.sweep_answer import Answer, answer_values, judge, parquet_of, price_decimals
from penstock.measure.sweep_ranges import Prices
from penstock.simulate.scenario import scenario_named

GB = 10**9
RAM_IS_DEAR = Prices(memory=3 / GB, local_disk=0.1 / GB, staging=0.0)


def outcomes(
    runs: dict[tuple[int, int, int], float | None], bounds: dict[int, float] | None = None
) -> dict[Task, Outcome]:
    """Run time by (ranks, GB of RAM, GB of SSD); None for N/A. The bound of N ranks is 400 / N s."""
    bounds = bounds or {ranks: 400 / ranks for ranks, _, _ in runs}
    found = {
        Task(Point(ranks, GB, 0, 0), LOWER_BOUND): Outcome("done", run_seconds=seconds)
        for ranks, seconds in bounds.items()
    }
    for (ranks, ram, ssd), seconds in runs.items():
        task = Task(Point(ranks, GB, ram * GB, ssd * GB), "frequency")
        found[task] = (
            Outcome("not supported", reason="too small") if seconds is None else Outcome("done", seconds)
        )
    return found


def gigabytes(answer: Answer, which: str) -> list[tuple[int, int]]:
    rows = getattr(answer, which)
    rows = rows if isinstance(rows, tuple) else (rows,) if rows is not None else ()
    return [(row.point.memory_bytes // GB, row.point.local_disk_bytes // GB) for row in rows]


def test_the_cheapest_within_the_tolerance_wins_and_the_front_is_what_nothing_beats() -> None:
    """Bound 100 s: 105 s is within 5 %; 40 GB of RAM cost 120 a host, 80 GB of SSD 8."""
    answer = judge(
        outcomes(
            {(4, 40, 0): 103.0, (4, 0, 80): 105.0, (4, 0, 40): 106.0, (4, 20, 80): 104.0, (4, 0, 0): None}
        ),
        within=0.05,
        prices=RAM_IS_DEAR,
    )

    assert gigabytes(answer, "cheapest") == [(0, 80)]
    assert answer.cheapest is not None
    assert answer.cheapest.price == pytest.approx(4 * 8)
    assert answer.cheapest.slowdown == pytest.approx(0.05)
    assert gigabytes(answer, "sufficient") == [(40, 0), (0, 80), (20, 80)]
    assert gigabytes(answer, "front") == [(0, 40), (0, 80), (20, 80), (40, 0)]
    assert answer.closest is None
    assert answer.least == ()


def test_of_equally_cheap_ones_the_fastest_is_chosen() -> None:
    answer = judge(
        outcomes({(4, 1, 0): 104.0, (4, 2, 0): 102.0, (4, 3, 0): 103.0}), within=0.05, prices=Prices(rank=7.0)
    )

    assert gigabytes(answer, "cheapest") == [(2, 0)]
    assert gigabytes(answer, "front") == [(2, 0)]


def test_where_none_suffices_the_closest_is_named() -> None:
    answer = judge(
        outcomes({(4, 1, 0): 150.0, (4, 2, 0): 120.0, (4, 0, 0): None}), within=0.05, prices=Prices()
    )

    assert answer.cheapest is None
    assert answer.sufficient == ()
    assert gigabytes(answer, "closest") == [(2, 0)]


@for_each(
    ("prices", "least", "decimals"),
    [
        ([16.0, 132.0], 0, 0),
        ([16.0, 132.0], 2, 2),
        ([1964.2, 1964.3], 0, 1),
        ([1964.29, 1964.31], 0, 2),
        ([12.288, 12.2884], 2, 4),
        ([0.004, 20.0], 2, 3),  # none is written as 0.00
        ([0.0], 2, 2),
        ([0.1 + 0.2, 0.3], 2, 2),  # the same price, but for rounding
        ([1e-9, 2e-9], 0, 6),  # as far as it goes
        ([], 2, 2),
    ],
)
def test_prices_have_the_decimals_that_tell_them_apart(
    prices: list[float], least: int, decimals: int
) -> None:
    row = judge(outcomes({(4, 0, 0): 100.0}), within=0.05).rows[0]

    assert price_decimals([replace(row, price=price) for price in prices], least) == decimals


def test_where_nothing_ran_nothing_is_named() -> None:
    answer = judge(outcomes({(4, 0, 0): None}), within=0.05, prices=Prices())

    assert (answer.cheapest, answer.closest, answer.front, answer.sufficient) == (None, None, (), ())


def test_without_prices_what_cannot_be_reduced_is_listed() -> None:
    """40 GB of either suffice, or 20 of both; 40 of one and 20 of the other is more than needed."""
    answer = judge(
        outcomes(
            {(4, 40, 0): 101.0, (4, 0, 40): 102.0, (4, 20, 20): 103.0, (4, 40, 20): 100.0, (4, 20, 0): 200.0}
        ),
        within=0.05,
    )

    assert gigabytes(answer, "least") == [(40, 0), (0, 40), (20, 20)]
    assert answer.cheapest is None
    assert answer.front == ()


def test_each_number_of_ranks_has_its_own_bound() -> None:
    """202 s are 1 % over the bound of two ranks, 110 s are 10 % over that of four."""
    answer = judge(outcomes({(2, 1, 0): 202.0, (4, 1, 0): 110.0}), within=0.05, prices=Prices(rank=1.0))

    assert answer.cheapest is not None
    assert answer.cheapest.point.ranks == 2
    assert [row.point.ranks for row in answer.front] == [2, 4]


def test_a_deadline_rules_out_what_is_slow_however_close_to_its_bound() -> None:
    found = outcomes({(2, 1, 0): 202.0, (4, 1, 0): 104.0})

    answer = judge(found, within=0.05, prices=Prices(rank=1.0), deadline_seconds=150.0)

    assert answer.cheapest is not None
    assert answer.cheapest.point.ranks == 4
    assert judge(found, within=0.05, deadline_seconds=50.0).closest is not None


def test_a_bound_that_is_not_known_decides_nothing() -> None:
    found = outcomes({(4, 1, 0): 104.0})
    found[Task(Point(4, GB, 0, 0), LOWER_BOUND)] = Outcome("failed", reason="killed")

    answer = judge(found, within=0.05, prices=Prices(rank=1.0))

    assert answer.rows[0].slowdown is None
    assert answer.cheapest is None
    assert answer.closest is None
    assert len(answer.front) == 1


@pytest.mark.parametrize(
    "wrong", [{"within": -0.1}, {"within": math.nan}, {"within": 0.1, "deadline_seconds": 0.0}]
)
def test_a_tolerance_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"within|deadline"):
        judge({}, **wrong)


runs = st.dictionaries(
    st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(0, 3)),
    st.none() | st.floats(100.0, 900.0),
    min_size=1,
    max_size=12,
)


@given(runs, st.floats(0.0, 2.0))
def test_nothing_beats_what_is_recommended(
    found: dict[tuple[int, int, int], float | None], within: float
) -> None:
    answer = judge(outcomes(found), within=within, prices=RAM_IS_DEAR)
    ran = [row for row in answer.rows if row.outcome.run_seconds is not None]

    for row in answer.sufficient:
        assert row.slowdown is not None
        assert row.slowdown <= within + 1e-9
        assert answer.cheapest is not None
        assert answer.cheapest.price is not None
        assert row.price is not None
        assert answer.cheapest.price <= row.price
    for row in ran:
        assert any(
            each.price <= row.price and each.outcome.run_seconds <= row.outcome.run_seconds  # type: ignore[operator]
            for each in answer.front
        )
    for one, other in zip(answer.front, answer.front[1:], strict=False):
        assert one.price < other.price  # type: ignore[operator]
        assert one.outcome.run_seconds > other.outcome.run_seconds  # type: ignore[operator]


def test_the_best_that_the_loader_runs_stands_beside_the_best_of_all() -> None:
    """An SSD of 80 GB is cheaper than 40 GB of RAM, and the loader of today keeps nothing on disks."""
    sweep = Sweep(scenario_named("scenario1"), ("frequency",))
    found = outcomes({(1, 40, 0): 401.0, (1, 80, 0): 400.0, (1, 0, 80): 402.0, (1, 1, 0): None})
    on_disk = Task(Point(1, GB, 0, 80 * GB), "frequency")
    found[on_disk] = replace(found[on_disk], why_not_run="samples in memory only")

    answer = judge(found, within=0.05, prices=RAM_IS_DEAR)

    assert gigabytes(answer, "cheapest") == [(0, 80)]
    assert answer.of_loader is not None
    assert gigabytes(answer.of_loader, "cheapest") == [(40, 0)]
    values = answer_values(answer, sweep)
    assert values["cheapest"]["is_runnable"] is False
    assert values["cheapest"]["not_runnable_reason"] == "samples in memory only"
    assert values["of_loader"]["cheapest"]["memory_bytes"] == 40 * GB
    assert [row["is_runnable"] for row in values["results"]] == [True, True, False, False]
    assert values["results"][3]["not_runnable_reason"] == "too small"

    memory = judge(outcomes({(1, 40, 0): 401.0}), within=0.05, prices=RAM_IS_DEAR)
    assert memory.of_loader is None


def test_the_json_says_all_and_is_json() -> None:
    sweep = Sweep(scenario_named("scenario1"), ("frequency",))
    answer = judge(outcomes({(4, 40, 0): 103.0, (4, 0, 0): None}), within=0.05, prices=RAM_IS_DEAR)

    values = json.loads(json.dumps(answer_values(answer, sweep), allow_nan=False))

    assert values["lower_bounds"] == [{"ranks": 4, "run_seconds": 100.0}]
    assert values["deadline_seconds"] is None
    assert values["cheapest"] == values["front"][0] == values["results"][0]
    assert values["results"][0]["memory_bytes"] == 40 * GB
    assert (values["results"][1]["status"], values["results"][1]["reason"]) == ("not supported", "too small")
    assert values["results"][1]["run_seconds"] is None


def test_parquet_has_a_line_per_row_with_its_inputs_and_the_scenario() -> None:
    scenario = replace(scenario_named("scenario1"), seed=7)
    answer = judge(outcomes({(4, 40, 0): 103.0, (4, 0, 0): None}), within=0.05)

    table = parquet.read_table(io.BytesIO(parquet_of(answer, Sweep(scenario, ("frequency",)))))

    first, second = table.to_pylist()
    assert first["run_seconds"] == 103.0
    assert (first["memory_bytes"], first["local_disk_bytes"], first["seed"], first["batch_size"]) == (
        40 * GB,
        0,
        7,
        100,
    )
    assert second["run_seconds"] is None
    assert (first["is_sufficient"], second["is_sufficient"]) == (True, False)
    assert type(scenario).from_toml(table.schema.metadata[b"penstock.scenario"].decode()) == scenario
