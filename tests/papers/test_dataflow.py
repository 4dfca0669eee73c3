"""Figures of TensorFlow's white paper, as graphs."""

from __future__ import annotations

import pytest

from penstock.papers.catalog import Repeated
from penstock.papers.dataflow import Box, figure_4, figure_6, figure_7, figure_9, layers_of, with_transfers


def test_all_users_of_a_value_on_a_device_share_one_transfer() -> None:
    boxes = [
        Box("x", "Placeholder", (), "A"),
        Box("near", "ReLU", ("x",), "A"),
        Box("b", "ReLU", ("x",), "B"),
        Box("c", "Add", ("x", "b"), "B"),
        Box("d", "Neg", ("x",), "C"),
    ]

    found = {box.name: box for box in with_transfers(boxes)}

    assert [name for name in found if name.startswith("send")] == ["send x to B", "send x to C"]
    assert found["b"].inputs == ("recv x on B",)
    assert found["c"].inputs == ("recv x on B", "b")
    assert found["near"].inputs == ("x",)
    assert found["recv x on B"].device == "B"
    assert layers_of(list(found.values())) == {
        "x": 0,
        "near": 1,
        "b": 3,
        "c": 4,
        "d": 3,
        "send x to B": 1,
        "recv x on B": 2,
        "send x to C": 1,
        "recv x on C": 2,
    }


def _numbers(repeated: Repeated) -> dict[str, float | None]:
    return {each.of: each.computed for each in repeated.results}


@pytest.mark.usefixtures("fonts")
def test_figures_say_what_their_graphs_do() -> None:
    four, six, seven = figure_4(), figure_6(), figure_7()

    assert list(_numbers(four).values()) == [2, 1]
    assert _numbers(six) == {"nodes": 6, "nodes that run for f with b fed": 2, "f for b = 3": 12}
    numbers = _numbers(seven)
    assert numbers["synchronous, updates of the parameters"] == 1
    assert numbers["asynchronous, updates of the parameters"] == 3
    # The mean of the slopes 2 (0 - 0), 2 (0 - 1), 2 (0 - 2) is -2, and a step is a tenth of it, the other way.
    assert numbers["synchronous, a parameter after a step"] == pytest.approx(0.2)
    assert _numbers(figure_9())["steps of a graph at the same time"] == 3
    for repeated in (four, six, seven):
        assert len(repeated.draw().axes) == 2
