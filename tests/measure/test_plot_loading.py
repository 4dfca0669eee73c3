"""Pictures of loading policies show what the runs say."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.measure.plot_loading import draw_policies, draw_scaling
from penstock.measure.policies import PolicyRuns, run_policies
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.scenario import Scenario, scenario_named
from penstock.simulate.sizes import SizeDistribution


def _scenario() -> Scenario:
    scenario = scenario_named("scenario1")
    assert isinstance(scenario.data, SizeDistribution)
    return replace(scenario, data=replace(scenario.data, samples=1000), epochs=3)


def _runs(ranks: tuple[int, ...] = (), *, names: tuple[str, ...] = POLICY_NAMES) -> list[PolicyRuns]:
    return run_policies(_scenario(), [policy_named(name) for name in names], ranks=ranks)


@pytest.fixture(autouse=True, scope="module")
def _fonts() -> None:
    """Matplotlib keeps the files of its fonts open for as long as the process lives."""
    draw_policies("fonts", _runs(names=("naive",))).savefig(BytesIO())


def test_lines_are_the_series_and_bars_add_up_to_the_run() -> None:
    runs = _runs()

    figure = draw_policies("scenario1", runs)

    progress, stalls, bars = figure.axes
    for line, run in zip(progress.get_lines(), runs, strict=True):
        assert line.get_label() == run.policy
        assert run.result is not None
        assert np.asarray(line.get_ydata()).tolist() == run.result.step_end_seconds.tolist()
    assert len(stalls.patches) == len(runs)
    widths = np.array([[bar.get_width() for bar in container] for container in bars.containers])
    assert widths.sum(axis=0).tolist() == pytest.approx([run.run_seconds[0] for run in runs])
    assert (widths > -1e-6).all()
    assert [label.get_text() for label in bars.get_yticklabels()] == list(POLICY_NAMES)
    assert len({(str(line.get_color()), str(line.get_linestyle())) for line in progress.get_lines()}) > 10


def test_scaling_is_run_time_against_ranks() -> None:
    runs = _runs((1, 2, 4), names=("naive", "cover", "push"))

    (axes,) = draw_scaling("scenario1", runs).axes

    for line in axes.get_lines():
        assert np.asarray(line.get_xdata()).tolist() == [1, 2, 4]
        expected = [run.mean_seconds for run in runs if run.policy == line.get_label()]
        assert np.asarray(line.get_ydata()).tolist() == expected


def test_policies_that_cannot_run_are_left_out_and_one_of_ones_own_is_drawn() -> None:
    cannot = PolicyRuns("lbann-dynamic", 4, (), None, 1, "too large")
    own = replace(_runs(names=("naive",))[0], policy="my own")

    figure = draw_policies("scenario1", [cannot, own])

    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["my own"]
    with pytest.raises(ConfigError, match="no policy could run"):
        draw_policies("scenario1", [cannot])
    with pytest.raises(ConfigError, match="no policy could run"):
        draw_scaling("scenario1", [cannot])
