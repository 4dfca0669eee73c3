"""Switch, Merge, Enter, Leave and NextIteration; Cond and While, which are lowered to them."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.graph.graphs import any_value, body, constant, evaluate, node

from penstock.errors import WaitTimeout
from penstock.graph import Graph, GraphError, Session, Statistics, gradients

BOTH = pytest.mark.parametrize("regions", [True, False])


def counting(
    limit: int, *, frame: str = "loop", parallel: int = 10, start: str = "zero:0"
) -> list[dict[str, Any]]:
    """Return a loop made by hand that counts from a value to a limit."""
    return [
        node("next", "NextIteration", "more:0"),
        node("enter", "Enter", start, frame=frame, parallel_iterations=parallel),
        node("merge", "Merge", "enter:0 next:0"),
        node("limit", "Enter", "bound:0", frame=frame, is_constant=True),
        node("step", "Enter", "one:0", frame=frame, is_constant=True),
        node("test", "Less", "merge:0 limit:0"),
        node("gate", "Switch", "merge:0 test:0"),
        node("more", "Add", "gate:1 step:0"),
        node("leave", "Leave", "gate:0"),
        constant("zero", 0, "int32"),
        constant("one", 1, "int32"),
        constant("bound", limit, "int32"),
    ]


@BOTH
@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("limit", [-1, 0, 1, 50])
def test_a_loop_made_by_hand_runs_until_its_condition_ends_it(
    limit: int, parallel: int, regions: bool
) -> None:
    assert evaluate(counting(limit, parallel=parallel), "leave:0", regions=regions) == max(limit, 0)


@BOTH
def test_a_dead_value_makes_what_follows_dead_until_a_merge_has_a_live_one(regions: bool) -> None:
    nodes = [
        node("p", "Placeholder", dtype="bool", shape=[]),
        constant("x", 3.0),
        node("gate", "Switch", "x:0 p:0"),
        node("no", "Neg", "gate:0"),
        node("yes", "Square", "gate:1"),
        node("tied", "Exp", "x:0", ctrl=["yes"]),
        node("both", "Add", "no:0 yes:0"),
        node("either", "Merge", "no:0 yes:0"),
        node("last", "Merge", "both:0 either:0"),
    ]
    with Session(Graph(nodes), regions=regions) as session:
        for taken, value in ((False, -3.0), (True, 9.0)):
            statistics = Statistics()
            results = session.run(
                ["either:0", "either:1", "last:0", "last:1"], {"p": taken}, statistics=statistics
            )
            assert results == [value, int(taken), value, 1]
            assert ("yes" in statistics.kernels, "no" in statistics.kernels) == (taken, not taken)
            assert "both" not in statistics.kernels
        for fetch in ("yes:0", "both:0", "tied:0"):
            with pytest.raises(GraphError) as caught:
                session.run(fetch, {"p": False})
            assert caught.value.kind == "dead_fetch"
            assert caught.value.node == fetch.partition(":")[0]
        session.run((), {"p": False}, ["both"])


@BOTH
def test_a_loop_in_a_branch_that_is_not_taken_ends_dead(regions: bool) -> None:
    nodes = [
        node("p", "Placeholder", dtype="bool", shape=[]),
        node("gate2", "Switch", "zero:0 p:0"),
        *counting(5, start="gate2:1"),
        node("either", "Merge", "leave:0 gate2:0"),
    ]
    with Session(Graph(nodes), regions=regions) as session:
        assert session.run(["either:0", "either:1"], {"p": True}) == [5, 0]
        assert session.run(["either:0", "either:1"], {"p": False}) == [0, 1]


def loop(parallel: int = 10) -> list[dict[str, Any]]:
    """Return a While of three carries over captures, with a condition in its body."""
    return [
        node("n", "Placeholder", dtype="int32", shape=[]),
        node("x", "Placeholder", dtype="float32", shape=[2]),
        constant("zero", 0, "int32"),
        constant("start", [1.0, 1.0]),
        constant("half", [0.5, 0.5]),
        node(
            "w",
            "While",
            "zero:0 start:0 start:0",
            parallel_iterations=parallel,
            cond=body("i a b", [node("t", "Less", "i n:0")], "t:0"),
            body=body(
                "i a b",
                [
                    constant("one", 1, "int32"),
                    constant("two", 2, "int32"),
                    constant("zero", 0, "int32"),
                    node("j", "Add", "i one"),
                    node("m", "Div", "i two"),
                    node("d", "Mul", "m two"),
                    node("even", "Equal", "d i"),
                    node("c", "Mul", "a x:0"),
                    node(
                        "choice",
                        "Cond",
                        "even b",
                        then=body("b", [node("s", "Add", "b half:0")], "s"),
                        else_=body("b", [node("k", "Mul", "b c"), constant("o", [1.0, 1.0])], "k"),
                    ),
                ],
                "j c choice:0",
            ),
        ),
    ]


@BOTH
@pytest.mark.parametrize("parallel", [1, 2, 32])
def test_a_while_with_a_condition_and_captures_is_what_python_computes(parallel: int, regions: bool) -> None:
    x = np.array([0.5, 1.25], np.float32)
    with Session(Graph(loop(parallel)), regions=regions) as session:
        for trips in (0, 1, 7):
            a = b = np.ones(2, np.float32)
            for i in range(trips):
                c = a * x
                b = b + np.float32(0.5) if i % 2 == 0 else b * c
                a = c
            result = session.run(["w:0", "w:1", "w:2"], {"n": np.int32(trips), "x": x})
            assert result[0] == trips
            np.testing.assert_allclose(result[1:], [a, b], rtol=1e-6)


@BOTH
def test_loops_nest_and_draws_belong_to_their_iterations_whatever_runs_at_once(regions: bool) -> None:
    def nodes(inner: int, outer: int) -> list[dict[str, Any]]:
        count = [constant("one", 1, "int32"), node("j", "Add", "i one")]
        sum_inside = node(
            "rows",
            "While",
            "zero:0 total",
            parallel_iterations=inner,
            cond=body("k t", [constant("three", 3, "int32"), node("c", "Less", "k three")], "c"),
            body=body(
                "k t",
                [
                    constant("one", 1, "int32"),
                    node("l", "Add", "k one"),
                    node("draw", "RandomUniform", shape=[2], dtype="float64"),
                    node("u", "Add", "t draw"),
                ],
                "l u",
            ),
        )
        return [
            constant("zero", 0, "int32"),
            constant("none", [0.0, 0.0], "float64"),
            node(
                "w",
                "While",
                "zero:0 none:0",
                parallel_iterations=outer,
                cond=body("i total", [constant("four", 4, "int32"), node("c", "Less", "i four")], "c"),
                body=body("i total", [*count, sum_inside], "j rows:1"),
            ),
        ]

    results = []
    for inner, outer in ((1, 1), (5, 3)):
        with Session(Graph(nodes(inner, outer)), regions=regions, seed=3) as session:
            results.append([session.run("w:1").tolist() for _ in range(2)])

    assert results[0] == results[1]
    assert results[0][0] != results[0][1]
    statistics = Statistics()
    with Session(Graph(nodes(1, 1))) as session:
        session.run("w:1", statistics=statistics)
    assert statistics.kernels["w/rows/draw"] == 12


def test_live_iterations_are_bounded_by_parallel_iterations() -> None:
    """Iterations wait for elements of a queue, so as many as may have begun have asked."""
    nodes = [
        constant("zero", 0, "int32"),
        node("q", "FIFOQueue", capacity=100, components=[["int32", []]]),
        node("put", "Enqueue", "q:0 zero:0"),
        node(
            "w",
            "While",
            "zero:0 zero:0",
            parallel_iterations=3,
            cond=body("i s", [constant("ten", 10, "int32"), node("t", "Less", "i ten")], "t"),
            body=body(
                "i s",
                [
                    constant("one", 1, "int32"),
                    node("j", "Add", "i one"),
                    node("d", "Dequeue", "q:0"),
                    node("r", "Add", "s d"),
                ],
                "j r",
            ),
        ),
    ]
    with Session(Graph(nodes)) as session:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(session.run(["w:0", "w:1"])))
        thread.start()
        while len(session.waits()) < 3:
            thread.join(0.001)
        assert len(session.waits()) == 3
        for _ in range(10):
            session.run("put")
        thread.join()

    assert results == [[10, 0]]


def test_a_body_runs_what_has_an_effect_once_in_each_iteration_and_a_branch_only_if_it_is_taken() -> None:
    add = [constant("one", 1, "int64"), node("more", "AssignAdd", "v:0 one")]
    nodes = [
        node("v", "Variable", dtype="int64", shape=[]),
        constant("nought", 0, "int64"),
        node("set", "Assign", "v:0 nought:0"),
        node("get", "Read", "v:0", ctrl=["w", "c"]),
        constant("zero", 0, "int32"),
        node("p", "Placeholder", dtype="bool", shape=[]),
        node(
            "w",
            "While",
            "zero:0",
            cond=body("i", [constant("five", 5, "int32"), node("t", "Less", "i five")], "t"),
            body=body("i", [*add, constant("step", 1, "int32"), node("j", "Add", "i step")], "j"),
        ),
        node("c", "Cond", "p:0", then=body("", add, ""), else_=body("", [], "")),
    ]
    with Session(Graph(nodes)) as session:
        session.run("set")
        assert session.run("get:0", {"p": True}) == 6
        assert session.run("get:0", {"p": False}) == 11


def test_equal_loops_run_once_and_loops_with_state_or_draws_each_for_itself() -> None:
    def square(name: str, source: str, inside: dict[str, Any]) -> dict[str, Any]:
        count = [constant("one", 1, "int32"), node("j", "Add", "i one"), inside]
        return node(
            name,
            "While",
            f"zero:0 {source}",
            cond=body("i a", [constant("two", 2, "int32"), node("t", "Less", "i two")], "t"),
            body=body("i a", count, "j s"),
            where=name,
        )

    pure = node("s", "Square", "a")
    drawn = node("s", "RandomUniform", shape=[], dtype="float32")
    nodes = [
        constant("zero", 0, "int32"),
        node("x", "Placeholder", dtype="float32", shape=[]),
        square("a", "x:0", pure),
        square("b", "x:0", pure),
        square("c", "x:0", drawn),
        square("d", "x:0", drawn),
    ]
    statistics = Statistics()
    with Session(Graph(nodes)) as session:
        a, b, c, d = session.run(["a:1", "b:1", "c:1", "d:1"], {"x": np.float32(2)}, statistics=statistics)

    assert a == b == 16
    assert c != d
    assert statistics.kernels.get("a/s", 0) + statistics.kernels.get("b/s", 0) == 2
    assert statistics.kernels["c/s"] == statistics.kernels["d/s"] == 2


def growing(shapes: Any) -> list[dict[str, Any]]:
    attr = {} if shapes is None else {"carry_shapes": shapes}
    return [
        constant("zero", 0, "int32"),
        node("x", "Placeholder", dtype="int32", shape=[None]),
        node(
            "w",
            "While",
            "zero:0 x:0",
            cond=body("i a", [constant("two", 2, "int32"), node("t", "Less", "i two")], "t"),
            body=body(
                "i a",
                [constant("one", 1, "int32"), node("j", "Add", "i one"), node("b", "Concat", "a a", axis=0)],
                "j b",
            ),
            where="grow.py:1",
            **attr,
        ),
    ]


def test_a_carry_keeps_its_shape_unless_the_loop_leaves_it_open() -> None:
    one = np.ones(1, np.int32)

    assert evaluate(growing([None, [None]]), "w:1", {"x": one}).tolist() == [1] * 4
    with pytest.raises(GraphError, match=r"'w' \(grow\.py:1\).*carry 1") as caught:
        evaluate(growing(None), "w:1", {"x": one})
    assert caught.value.kind == "mismatch"


def test_handles_pass_through_loops_conditions_and_merges_and_any_shape_may_be_left_open() -> None:
    graph = Graph()
    queue = graph.add("FIFOQueue", capacity=9, components=[["int32", []]], name="q")
    variable = graph.variable("int32", [], initial=7, name="v")
    start = graph.initialize_all().name

    def grow(i: Any, rows: Any, given: Any) -> Any:
        graph.add("Enqueue", given, i)
        return i + 1, graph.add("Concat", rows, rows, axis=0), given

    rows = graph.placeholder("int32", None, name="rows")
    carries = [graph.constant(0), rows, queue]
    loop = graph.while_loop(lambda i, *_: i < 3, grow, carries, carry_shapes=[None, "any", None])
    (size,) = graph.cond(
        graph.constant(True),
        lambda q, v: graph.add("Add", graph.add("QueueSize", q), v),
        lambda q, v: v,
        [loop[2], variable],
    )
    merged, _ = graph.add("Merge", variable)
    with Session(Graph.from_json(graph.to_json())) as session:
        session.run(start)
        results = session.run([loop[1].name, size.name, merged.name], {"rows": np.ones(1, np.int32)})

    assert [each.tolist() for each in results] == [[1] * 8, 10, 7]


@pytest.mark.parametrize("op", ["While", "Cond"])
def test_a_predicate_of_another_shape_names_the_loop_or_condition(op: str) -> None:
    predicate = node("p", "Placeholder", dtype="bool", shape=None)
    parts = {"cond": body("a", [], "p:0"), "body": body("a", [], "a")}
    if op == "Cond":
        parts = {"then": body("a", [], "a"), "else_": body("a", [], "a")}
    inputs = "x:0" if op == "While" else "p:0 x:0"
    nodes = [predicate, constant("x", 1.0), node("n", op, inputs, where="model.py:5", **parts)]

    with pytest.raises(GraphError, match=r"'n' \(model\.py:5\).*shape \[1\]") as caught:
        evaluate(nodes, "n:0", {"p": np.array([True])})
    assert caught.value.kind == "mismatch"


def test_inputs_of_two_frames_and_a_cycle_without_nextiteration_are_refused() -> None:
    with pytest.raises(GraphError, match="Enter") as caught:
        evaluate([*counting(5), node("bad", "Add", "merge:0 one:0"), node("out", "Leave", "bad:0")], "out:0")
    assert caught.value.kind == "mismatch"
    with pytest.raises(GraphError, match="cycle"):
        Graph([node("a", "Merge", "b:0"), node("b", "Identity", "a:0")])


@BOTH
def test_a_loop_gives_what_it_has_to_a_queue_that_another_of_its_inputs_waits_for(regions: bool) -> None:
    """The count does not need the other carry, which comes from the queue that the count goes into; a condition is
    alive where only the branch that is not taken has a dead input."""
    then = body("", [node("b", "Add", "got:0 one:0")], "b")
    nodes = [
        constant("zero", 0, "int32"),
        constant("one", 1, "int32"),
        constant("three", 3, "int32"),
        node("q", "FIFOQueue", capacity=1, components=[["int32", []]]),
        node("got", "Dequeue", "q:0"),
        node(
            "w",
            "While",
            "zero:0 got:0",
            cond=body("i x", [node("t", "Less", "i three:0")], "t"),
            body=body("i x", [node("n", "Add", "i one:0"), node("m", "Mul", "x x")], "n m"),
        ),
        node("put", "Enqueue", "q:0 w:0"),
        node("yes", "Less", "zero:0 one:0"),
        node("gate", "Switch", "three:0 yes:0"),
        node("c", "Cond", "yes:0", then=body("", [], "three:0"), else_=body("", [], "gate:0")),
        node("d", "Cond", "yes:0", then=then, else_=body("", [], "one:0")),
    ]
    with Session(Graph(nodes), regions=regions) as session:
        assert session.run("w:1", targets=["put"], timeout_seconds=20) == 3**8
        assert session.run("c:0") == 3
        assert session.run("d:0", {"got:0": 6}) == 7


def test_what_fails_in_a_loop_that_runs_inside_of_a_region_names_its_node() -> None:
    nodes = [
        node("m", "Placeholder", dtype="float32", shape=[None, None]),
        node("p", "Placeholder", dtype="bool", shape=[]),
        node(
            "w",
            "While",
            "m:0",
            cond=body("a", [], "p:0"),
            body=body(
                "a",
                [node("c", "Cond", "p:0 a", then=body("b", [SQUARED], "s"), else_=body("b", [], "b"))],
                "c",
            ),
        ),
    ]
    with pytest.raises(GraphError, match=r"'w/c/s' \(model\.py:8\).*columns") as caught:
        evaluate(nodes, "w:0", {"m": np.ones((2, 3), np.float32), "p": True})
    assert caught.value.kind == "mismatch"


SQUARED = node("s", "MatMul", "b b", where="model.py:8")


@for_each("made", ["by hand", "as a While"])
@for_each("ending", ["close", "timeout"])
def test_a_loop_without_end_is_ended(ending: str, made: str) -> None:
    nodes = counting(1)
    for each in nodes:
        if each["name"] == "more":
            each["in"] = ["gate:1", "none:0"]
    nodes += [
        constant("nought", 0, "int32"),
        node("none", "Enter", "nought:0", frame="loop", is_constant=True),
    ]
    if made == "as a While":
        always = body("i", [constant("yes", True, "bool")], "yes")
        nodes = [constant("x", 1.0), node("leave", "While", "x:0", cond=always, body=body("i", [], "i"))]
    session = Session(Graph(nodes))
    if ending == "timeout":
        with pytest.raises(WaitTimeout, match="loop"):
            session.run("leave:0", timeout_seconds=0.01)
        session.close()
        return
    errors: list[Any] = []

    def work() -> None:
        with pytest.raises(GraphError) as caught:
            session.run("leave:0")
        errors.append(caught.value.kind)

    thread = threading.Thread(target=work)
    thread.start()
    while not session._steps and thread.is_alive():
        thread.join(0.001)
    session.close()
    thread.join()

    assert errors == ["cancelled"]


def test_a_loop_that_fails_says_where_and_frees_the_session() -> None:
    def fail(value: torch.Tensor) -> torch.Tensor:
        if int(value) == 3:
            raise ValueError("three")
        return value + 1

    nodes = [
        constant("zero", 0, "int32"),
        node(
            "w",
            "While",
            "zero:0",
            cond=body("i", [constant("nine", 9, "int32"), node("t", "Less", "i nine")], "t"),
            body=body(
                "i", [node("f", "Call", "i", function="f", outputs=[["int32", []]], where="here:1")], "f"
            ),
        ),
    ]
    with Session(Graph(nodes), functions={"f": fail}) as session:
        for _ in range(2):
            with pytest.raises(GraphError, match=r"'w/f' \(here:1\).*three") as caught:
                session.run("w:0")
            assert caught.value.kind == "kernel"


#: In these, a condition that took the wrong branch would show.
TELLING = (9, 12, 19, 30, 32, 34, 40, 41)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in TELLING else pytest.mark.slow) for seed in range(200)]
)
def test_loops_and_conditions_give_the_same_as_code_of_a_region_and_as_primitives(seed: int) -> None:
    """Random graphs with their gradients, of which differences of the result are an independent account."""
    random, generator = Random(seed), np.random.default_rng(seed)
    graph = Graph()
    xs = [graph.placeholder("float64", [2], name=f"x{place}") for place in range(3)]
    pool, count = list(xs), graph.placeholder("int32", [], name="count")
    for _ in range(5):
        pool.append(any_value(graph, random, pool, [count]))
    y = graph.add("Sum", graph.add("Concat", *pool[3:], axis=0))
    slopes = gradients(graph, y, xs)
    fetches = [y, *(each for each in slopes if each is not None)]
    feeds: dict[str, Any] = {f"x{place}": generator.normal(size=2) for place in range(3)}
    feeds["count"] = int(generator.integers(4))
    with Session(graph) as session, Session(graph, regions=False) as plain:
        found = session.run(fetches, feeds)
        for one, other in zip(found, plain.run(fetches, feeds), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        present = iter(found[1:])
        for place, slope in enumerate(slopes):
            expected = np.zeros(2) if slope is None else next(present)
            step = generator.normal(size=2) * 1e-6
            ends = [
                session.run(y, feeds | {f"x{place}": feeds[f"x{place}"] + sign * step}) for sign in (1, -1)
            ]
            np.testing.assert_allclose((ends[0] - ends[1]) / 2, step @ expected, rtol=1e-4, atol=1e-11)
