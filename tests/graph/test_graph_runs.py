"""Feeds, fetches, partial runs, merging, errors of runs, memory and threads."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.forking import Forks
from tests.graph.graphs import body, constant, evaluate, node
from tests.patience import patient

from penstock.errors import WaitTimeout
from penstock.graph import Graph, GraphError, Session, Statistics, gradients
from penstock.graph.run.plan import Plan, make_plan

X = node("x", "Placeholder", dtype="float32", shape=[None, 3])
ONES = np.ones((2, 3), np.float32)

ARRAYS: dict[str, Any] = {
    "Add": (np.add, 2),
    "Sub": (np.subtract, 2),
    "Mul": (np.multiply, 2),
    "Div": (np.divide, 2),
    "Greater": (np.greater, 2),
    "Less": (np.less, 2),
    "Equal": (np.equal, 2),
    "Exp": (np.exp, 1),
    "Log": (np.log, 1),
    "Neg": (np.negative, 1),
    "Square": (np.square, 1),
    "Identity": (np.copy, 1),
    "ReLU": (lambda x: np.maximum(x, 0), 1),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 1),
    "SoftMax": (lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True), 1),
    "MatrixInverse": (np.linalg.inv, 1),
    "MatrixDeterminant": (np.linalg.det, 1),
    "MatMul": (np.matmul, 2),
    "Rank": (lambda x: np.int32(x.ndim), 1),
    "Shape": (lambda x: np.array(x.shape, np.int32), 1),
    "Sum": (np.sum, 1),
}


@for_each("op", ARRAYS)
def test_operations_give_what_numpy_gives(op: str) -> None:
    function, count = ARRAYS[op]
    values = [np.random.default_rng(seed).uniform(0.5, 2, (3, 3)) for seed in range(count)]
    nodes = [node(f"x{place}", "Placeholder", dtype="float64", shape=None) for place in range(count)]
    nodes.append(node("y", op, " ".join(f"x{place}:0" for place in range(count))))

    result = evaluate(nodes, "y:0", {f"x{place}:0": each for place, each in enumerate(values)})

    np.testing.assert_allclose(result, function(*values), rtol=1e-12)


def test_parts_of_arrays_of_numbers_and_bytes() -> None:
    words = np.array([[b"a", b"b", b"c"], [b"d", b"e", b"\xff"]], object)
    nodes = [
        X,
        node("w", "Placeholder", dtype="bytes", shape=[None, 3]),
        *(node(f"cut{kind}", "Slice", f"{kind}:0", begin=[0, 1], size=[-1, 2]) for kind in "xw"),
        *(node(f"join{kind}", "Concat", f"{kind}:0 cut{kind}:0", axis=1) for kind in "xw"),
        *(node(f"part{kind}", "Split", f"{kind}:0", axis=1, num=3) for kind in "xw"),
        node("sum", "Sum", "x:0", axis=0),
        node("same", "Equal", "w:0 w:0"),
    ]

    joined, words_joined, part, word, total, same = evaluate(
        nodes, ["joinx:0", "joinw:0", "partx:2", "partw:2", "sum:0", "same:0"], {"x": ONES, "w": words}
    )

    assert joined.shape == (2, 5)
    assert words_joined.tolist() == np.concatenate([words, words[:, 1:]], 1).tolist()
    assert part.shape == (2, 1)
    assert word.tolist() == [[b"c"], [b"\xff"]]
    assert total.tolist() == [2, 2, 2]
    assert same.all()


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_convolutions_and_pools_agree_with_their_definition(padding: str) -> None:
    generator = np.random.default_rng(0)
    images, filters = generator.normal(size=(2, 5, 6, 3)), generator.normal(size=(2, 3, 3, 4))
    nodes = [
        node("x", "Placeholder", dtype="float64", shape=[None, 5, None, 3]),
        node("w", "Placeholder", dtype="float64", shape=[2, 3, 3, 4]),
        node("y", "Convolution2D", "x:0 w:0", strides=[2, 1], padding=padding),
        node("z", "Convolution2D", "x:0 w:0", padding=padding),
        node("p", "MaxPool", "x:0", ksize=[2, 3], strides=[2, 1], padding=padding),
    ]

    result, pooled, dense = evaluate(nodes, ["y:0", "p:0", "z:0"], {"x": images, "w": filters})

    same = padding == "SAME"
    # SAME: as many windows as strides reach into the image, the odd pad below and on the right.
    padded = np.pad(images, [(0, 0), (0, 1), (1, 1), (0, 0)]) if same else images
    highest = np.pad(images, [(0, 0), (0, 1), (1, 1), (0, 0)], constant_values=-np.inf) if same else images
    rows, columns = (3, 6) if same else (2, 4)
    expected = np.empty((2, rows, columns, 4))
    maxima = np.empty((2, rows, columns, 3))
    for row in range(rows):
        for column in range(columns):
            window = padded[:, 2 * row : 2 * row + 2, column : column + 3]
            expected[:, row, column] = np.einsum("nhwi,hwio->no", window, filters)
            maxima[:, row, column] = highest[:, 2 * row : 2 * row + 2, column : column + 3].max((1, 2))
    np.testing.assert_allclose(result, expected, rtol=1e-10)
    np.testing.assert_array_equal(pooled, maxima)
    assert dense.shape == ((2, 5, 6, 4) if padding == "SAME" else (2, 4, 4, 4))


def test_a_run_executes_exactly_what_it_needs_and_nodes_with_the_same_meaning_once() -> None:
    nodes = [
        X,
        node("a", "Exp", "x:0"),
        node("b", "Exp", "x:0"),
        node("c", "Add", "a:0 b:0"),
        node("d", "Neg", "c:0"),
        node("one", "RandomUniform", shape=[3]),
        node("two", "RandomUniform", shape=[3]),
        node("r", "Sub", "one:0 two:0"),
        constant("zero", 0.0),
        constant("minus", -0.0),
        node("z", "Div", "x:0 zero:0"),
        node("m", "Div", "x:0 minus:0"),
        node("late", "Identity", "zero:0", ctrl=["x"]),
    ]
    with Session(Graph(nodes)) as session:
        assert session.run(["late:0", "x"], {"x": ONES}) == [0.0, None]  # a feed stands for its Placeholder
        with pytest.raises(GraphError, match="'x'"):
            session.run("late:0")
        whole, cut, signs, draws = (Statistics() for _ in range(4))
        session.run("c:0", {"x": ONES}, statistics=whole)
        fed = session.run("c:0", {"a:0": ONES, "x": ONES}, statistics=cut)
        plus, minus = session.run(["z:0", "m:0"], {"x": ONES}, statistics=signs)
        different = session.run("r:0", statistics=draws)

    assert sorted(whole.kernels.values()) == [1, 1]
    assert whole.kernels.keys() in ({"a", "c"}, {"b", "c"})
    assert cut.kernels == {"b": 1, "c": 1}
    np.testing.assert_allclose(fed, 1 + np.exp(ONES))
    assert (plus == np.inf).all()
    assert (minus == -np.inf).all()
    assert draws.kernels == {"one": 1, "two": 1, "r": 1}
    assert (different != 0).any()


def test_a_fetched_operation_gives_no_value_and_fetches_keep_their_arrangement() -> None:
    nodes = [X, node("y", "Neg", "x:0"), node("all", "NoOp", ctrl=["y"])]

    result = evaluate(nodes, {"y": "y:0", "op": "all"}, {"x": ONES})

    assert result["op"] is None
    assert (result["y"] == -1).all()


def test_fed_arrays_are_copied_and_fetched_ones_are_the_callers_own() -> None:
    nodes = [
        X,
        node("v", "Variable", dtype="float32", shape=[2, 3]),
        node("set", "Assign", "v:0 x:0"),
        node("get", "Read", "v:0"),
        constant("c", [1.0, 2.0]),
    ]
    with Session(Graph(nodes)) as session:
        fed = ONES.copy()
        first = session.run("set:0", {"x": fed})
        fed[:] = 7
        first[:] = 8
        session.run("get:0")[:] = 9
        session.run("c:0")[:] = 9

        assert (session.run("get:0") == 1).all()
        assert (session.run("get:0", {"v:0": 3 * ONES}) == 3).all()
        assert session.run("c:0").tolist() == [1, 2]
        assert not np.shares_memory(session.run("x:0", {"x": ONES}), ONES)


WRONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "missing feed": ("y:0", {}, "missing_feed", "x"),
    "dtype": ("y:0", {"x": ONES.astype(np.float64)}, "mismatch", "float64"),
    "shape": ("y:0", {"x": ONES[:, :2]}, "mismatch", "[?, 3]"),
    "text for numbers": ("y:0", {"x": np.array([["a", "b", "c"]])}, "mismatch", "x"),
    "fetch": ("yy:0", {"x": ONES}, "not_found", "'y'"),
    "fetched port": ("y:1", {"x": ONES}, "not_found", "y:1"),
    "target": ("yy", {"x": ONES}, "not_found", "'y'"),
    "feed": ("y:0", {"xx": ONES}, "not_found", "'x'"),
    "uninitialised": ("get:0", {}, "uninitialized", "v"),
    "kernel": ("inverse:0", {}, "kernel", "model.py:7"),
    "mismatch that only a run can know": (
        "joined:0",
        {"x": ONES, "t": np.ones(2, np.float32)},
        "mismatch",
        "model.py:8",
    ),
    "dead": ("gate:1", {"x": ONES}, "dead_fetch", "gate"),
    "saved tensor": ("back:0", {}, "not_found", "back"),
    "queue": ("q:0", {}, "mismatch", "queue"),
}


@for_each("regions", [True, False])
@for_each("case", WRONG)
def test_errors_of_a_run_have_their_kind_and_node_and_leave_the_session_usable(
    case: str, regions: bool, tmp_path: Any
) -> None:
    fetch, feeds, kind, part = WRONG[case]
    nodes = [
        X,
        node("y", "Neg", "x:0"),
        node("v", "Variable", dtype="float32", shape=[2]),
        node("get", "Read", "v:0"),
        constant("flat", [[0.0, 0.0], [0.0, 0.0]]),
        node("inverse", "MatrixInverse", "flat:0", where="model.py:7"),
        node("t", "Placeholder", dtype="float32", shape=[None]),
        node("joined", "Add", "x:0 t:0", where="model.py:8"),
        constant("no", False, "bool"),
        node("gate", "Switch", "x:0 no:0"),
        node("back", "Restore", tensor="a", dtype="int8", path=str(tmp_path / "nothing")),
        node("q", "FIFOQueue", capacity=1, components=[["int8", []]]),
    ]
    with Session(Graph(nodes), regions=regions) as session:
        with pytest.raises(GraphError) as caught:
            session.run(fetch, feeds)

        assert caught.value.kind == kind
        assert part in str(caught.value)
        assert (session.run("y:0", {"x": ONES}) == -1).all()


class Peak:
    """Counts the bytes of float32 tensors of a size that live at the same time."""

    def __init__(self) -> None:
        self.most = 0
        self.living: set[int] = set()

    def see(self, tensor: torch.Tensor) -> None:
        self.living.add(id(tensor))
        weakref.finalize(tensor, self.living.discard, id(tensor))
        self.most = max(self.most, len(self.living))


def watched(peak: Peak, op: Any) -> Any:
    def kernel(*values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = op(*values)
        if isinstance(result, torch.Tensor) and result.numel() == 1000:
            peak.see(result)
        return result

    return kernel


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("shape", ["chain", "branches"])
def test_values_are_freed_at_their_last_use_and_what_was_begun_is_finished_first(
    shape: str, regions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = Peak()
    from penstock.graph.ops import registry

    for name in ("Exp", "Neg"):
        kernel = registry.operation(name).kernels["cpu"]
        monkeypatch.setitem(
            registry.operation(name).kernels, "cpu", lambda node, kernel=kernel: watched(peak, kernel(node))
        )
    nodes = [node("x", "Placeholder", dtype="float32", shape=[1000]), node("n0", "Neg", "x:0")]
    if shape == "chain":
        nodes += [node(f"n{place + 1}", "Neg", f"n{place}:0") for place in range(300)]
        fetch = "n300:0"
    else:
        for place in range(30):
            nodes += [constant(f"k{place}", float(place)), node(f"c{place}", "Mul", f"n0:0 k{place}:0")]
            nodes += [node(f"e{place}", "Exp", f"c{place}:0")]
        nodes += [node(f"s{place}", "Sum", f"e{place}:0") for place in range(30)]
        nodes += [node("t0", "Identity", "s0:0")]
        nodes += [node(f"t{place}", "Add", f"t{place - 1}:0 s{place}:0") for place in range(1, 30)]
        fetch = "t29:0"
    with Session(Graph(nodes), regions=regions) as session:
        session.run(fetch, {"x": np.zeros(1000, np.float32)})

    assert peak.most <= 5


@pytest.mark.parametrize("regions", [True, False])
def test_a_gradient_that_keeps_few_values_computes_the_others_again_and_is_the_same(
    regions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.graph.ops import registry

    kernel, peak = registry.operation("Sigmoid").kernels["cpu"], Peak()
    monkeypatch.setitem(
        registry.operation("Sigmoid").kernels, "cpu", lambda node: watched(peak, kernel(node))
    )
    graph = Graph()
    x = graph.placeholder("float32", [1000], name="x")
    values, y = [], x
    for _ in range(49):
        y = graph.add("Sigmoid", y)
        values.append(y)
    (taken,) = graph.cond(graph.constant(True), lambda: values[24] * y, lambda: y)
    loss = graph.add("Sum", taken)
    array = np.linspace(-3, 3, 1000, dtype=np.float32)
    found, most = [], []
    for keep in (None, values[6::7]):
        (slope,) = gradients(graph, loss, [x], keep=keep)
        assert slope is not None
        with Session(graph, regions=regions) as session:
            peak.most = 0
            found.append(session.run([loss, slope], {x: array}))
            most.append(peak.most)

    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert found[0][0] == found[1][0]
    assert most[0] >= 49
    # Those that are kept, a stretch between two of them, and what is at work.
    assert most[1] <= 7 + 7 + 3
    with pytest.raises(GraphError, match="nowhere"):
        gradients(graph, loss, [x], keep=["nowhere:0"])


def test_a_failed_step_keeps_nothing_it_had_computed() -> None:
    kept: list[Any] = []

    def function(given: torch.Tensor) -> torch.Tensor:
        result = given + 1
        kept.append(weakref.ref(result))
        return result

    nodes = [
        X,
        node("f", "Call", "x:0", function="f", outputs=[["float32", None]]),
        node("g", "Exp", "f:0"),
        constant("flat", [[0.0]]),
        node("bad", "MatrixInverse", "flat:0", ctrl=["g"]),
        node("t", "Add", "g:0 bad:0"),
    ]
    with Session(Graph(nodes), functions={"f": function}) as session:
        with pytest.raises(GraphError) as caught:
            session.run("t:0", {"x": ONES})
        gc.collect()

        assert caught.value.node == "bad"
        assert kept[0]() is None


def test_a_closed_session_is_freed_without_a_collection() -> None:
    """Its functions hold the graph's constants: as much as the variables on a worker."""

    def regions() -> int:
        return sum(isinstance(each, FunctionType) and each.__name__ == "region" for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = regions()
        with Session(Graph([X, constant("one", 1.0), node("y", "Add", "x:0 one:0")])) as session:
            session.run("y:0", {"x": ONES})
            assert regions() == before + 1
        del session
        assert regions() == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_hundred_thousand_steps_leave_nothing_behind() -> None:
    nodes = [
        constant("zero", 0.0),
        node("v", "Variable", dtype="float32", shape=[]),
        node("start", "Assign", "v:0 zero:0"),
        node("draw", "RandomUniform", shape=[]),
        node("sum", "AssignAdd", "v:0 draw:0"),
        node("q", "FIFOQueue", capacity=2, components=[["float32", []]]),
        node("put", "Enqueue", "q:0 sum:0"),
        node("get", "Dequeue", "q:0", ctrl=["put"]),
        X,
        node("y", "Mul", "x:0 get:0"),
    ]
    with Session(Graph(nodes)) as session:
        session.run("start")

        def run(steps: int) -> tuple[int, int]:
            """Return how many objects there are after so many steps, and the most memory that there was, in KiB."""
            for _ in range(steps):
                session.run("y:0", {"x": ONES})
            gc.collect()
            return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        objects, kilobytes = run(2000)
        objects_later, kilobytes_later = run(98_000)

    assert objects_later < objects + 500
    assert kilobytes_later < kilobytes + 8192


KEPT = """
import re
import resource
from pathlib import Path
from threading import Thread
import torch
from penstock.graph import Session
from penstock.heap import give_back_memory, keep_freed_memory

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(count) for _ in range(4)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

Session().close()
print(min(faults(2 << 20) for _ in range(6)))
keep_freed_memory()
print(min(faults(6 << 20) for _ in range(6)))

def mebibytes():
    return int(re.search(r"Rss: *(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) >> 10

def step():
    [torch.ones(5 << 20) for _ in range(12)]

before = mebibytes()
thread = Thread(target=step)
thread.start()
thread.join()
kept = mebibytes() - before
give_back_memory()
print(kept, mebibytes() - before)
"""


def test_memory_that_a_step_frees_is_kept_for_the_next_until_the_session_ends(forks: Forks) -> None:
    """A process that is a worker alone keeps more."""
    # Without, to fetch 32 MiB again takes 8,192 faults each time. With it, the system may take a page away at any time.
    told, status = forks.run(KEPT)

    assert status == 0, told
    *faults, kept, left = (int(number) for number in told.split())
    assert max(faults) < 1000, told
    assert (kept > 200, left < 130) == (True, True), told


def test_an_operation_has_several_kernels_that_a_node_chooses_by_name() -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 5)))
    nodes = [
        node("a", "Placeholder", dtype="float32", shape=[None, 4]),
        node("b", "Placeholder", dtype="float32", shape=[4, 5]),
        node("c", "MatMul", "a:0 b:0", kernel="onednn"),
        node("d", "MatMul", "a:0 b:0"),
    ]
    graph = Graph.from_json(Graph(nodes).to_json())
    (slope,) = gradients(graph, "c:0", ["b:0"])
    count = Statistics()
    with Session(graph) as session:
        c, d, db = session.run(["c:0", "d:0", slope], {"a": a, "b": b}, statistics=count)

    np.testing.assert_allclose([c, d], [a @ b] * 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(db, np.broadcast_to(a.sum(0)[:, None], (4, 5)), rtol=1e-5)
    assert (count.kernels["c"], count.kernels["d"]) == (1, 1)
    with pytest.raises(GraphError, match="no kernel 'onedn'; did you mean 'onednn'") as caught:
        Graph([*nodes[:2], node("c", "MatMul", "a:0 b:0", kernel="onedn")])
    assert caught.value.kind == "mismatch"


def test_what_was_read_of_a_variable_stays_when_it_is_added_to() -> None:
    """The value itself, a part of it, the constant that it was assigned, and a sum that was given before."""
    nodes = [
        constant("c", [1.0, 2.0]),
        node("v", "Variable", dtype="float32", shape=[2]),
        node("set", "Assign", "v:0 c:0"),
        node("first", "AssignAdd", "v:0 c:0", ctrl=["set"]),
        node("read", "Read", "v:0", ctrl=["first"]),
        node("part", "Slice", "read:0", begin=[1], size=[1]),
        node("second", "AssignAdd", "v:0 c:0", ctrl=["part"]),
        node("late", "Neg", "part:0", ctrl=["second"]),
        node("sum", "Neg", "first:0", ctrl=["second"]),
        node("same", "aten.detach.default", "read:0"),
        node("third", "AssignAdd", "v:0 c:0", ctrl=["same"]),
        node("last", "Neg", "same:0", ctrl=["third"]),
    ]
    with Session(Graph(nodes)) as session:
        assert session.run("late:0") == [-4]
        assert session.run("last:0").tolist() == [-2, -4]
        assert session.run("sum:0").tolist() == [-2, -4]
        assert session.run("c:0").tolist() == [1, 2]
        kept = session.run("second:0")
        session.run("second:0")
        assert kept.tolist() == [3, 6]


def test_many_threads_run_one_session_while_the_graph_grows() -> None:
    nodes = [
        node("v", "Variable", dtype="int64", shape=[]),
        node("zero", "Assign", "v:0 z:0"),
        constant("z", 0, "int64"),
        constant("one", 1, "int64"),
        node("add", "AssignAdd", "v:0 one:0"),
        node("more", "AssignAdd", "v:0 one:0"),
    ]
    with Session(Graph(nodes)) as session:
        session.run("zero")

        def work() -> None:
            for _ in range(50):
                session.run(["add", "more"])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for place in range(20):
            session.extend([node(f"n{place}", "Neg", "one:0")])
            assert session.run(f"n{place}:0") == -1
        for thread in threads:
            thread.join()

        assert session.run("v:0") == 400


def test_threads_that_run_something_first_at_once_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    looked: list[Any] = []

    class Plans(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if len(looked) < 2:
                looked.append(key)
                both.wait(patient(20))
            return found

    made: list[Plan] = []

    def make(*args: Any, **options: Any) -> Plan:
        made.append(make_plan(*args, **options))
        return made[-1]

    monkeypatch.setattr("penstock.graph.run.session.make_plan", make)
    with Session(Graph([constant("x", 1.0)])) as session:
        session._plans = Plans()
        threads = [threading.Thread(target=session.run, args=("x:0",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(looked) == 2
    assert len(made) == 1


def test_waiting_kernels_hold_no_thread_and_a_closed_session_ends_their_runs() -> None:
    nodes = [node("q", "FIFOQueue", capacity=1, components=[["int32", []]])]
    nodes += [node(f"d{place}", "Dequeue", "q:0") for place in range(64)]
    session = Session(Graph(nodes))
    errors: list[GraphError] = []
    before = threading.active_count()

    def wait() -> None:
        with pytest.raises(GraphError) as caught:
            session.run([f"d{place}:0" for place in range(64)])
        errors.append(caught.value)

    with pytest.raises(WaitTimeout, match="d63"):
        session.run([f"d{place}:0" for place in range(64)], timeout_seconds=0.01)
    thread = threading.Thread(target=wait)
    thread.start()
    while len(session.waits()) < 64:
        thread.join(0.001)
    assert threading.active_count() == before + 1
    session.close()
    session.close()
    thread.join()

    assert errors[0].kind == "cancelled"
    with pytest.raises(GraphError, match="closed"):
        session.run("d0:0")


def test_a_non_finite_value_is_named_where_it_arises() -> None:
    nodes = [X, node("log", "Log", "x:0", where="loss.py:3"), node("y", "Add", "log:0 x:0")]

    with pytest.raises(GraphError, match=r"'log' \(loss\.py:3\).*6 of 6"):
        evaluate(nodes, "y:0", {"x": 0 * ONES}, check_finite=True)


def test_opaque_functions_and_batches_are_nodes() -> None:
    nodes = [
        node("batch", "NextBatch", batches="train", outputs=[["float32", [None, 3]], ["int64", None]]),
        node("f", "Call", "batch:0", function="twice", outputs=[["float32", [None, 3]]]),
    ]
    batches = [(ONES, np.arange(2)), (2 * ONES, np.arange(2))]
    with Session(Graph(nodes), functions={"twice": lambda x: 2 * x}, batches={"train": batches}) as session:
        assert session.run("f:0")[0, 0] == 2
        assert session.run("f:0")[0, 0] == 4
        with pytest.raises(GraphError) as caught:
            session.run("batch")
    # Each of two nodes of the same batches is held to its own outputs.
    nodes.append(
        node("column", "NextBatch", batches="train", outputs=[["float32", [None, 1]], ["int64", None]])
    )
    with Session(Graph(nodes), batches={"train": 2 * batches}) as session:
        for _ in range(2):
            session.run("batch")
            with pytest.raises(GraphError, match=r"'column'.*output 0"):
                session.run("column")

    assert caught.value.kind == "out_of_range"


@pytest.mark.slow  # PyTorch imports its Python kernels for meta tensors: several seconds
def test_any_aten_operation_is_a_node_by_its_name() -> None:
    nodes = [X, node("y", "aten.clamp.default", "x:0", args=[{"input": 0}, 0.0, 0.5])]
    # One output, which PyTorch gives as a list of one.
    nodes.append(node("list", "aten.split.Tensor", "y:0", args=[{"input": 0}, 9]))
    nodes += [constant("one", [[1.0, 2.0]]), node("bare", "aten.unbind.int", "one:0")]
    graph = Graph(nodes)

    assert graph.nodes["y"].outputs[0].shape == (None, 3)
    results = evaluate(nodes, ["y:0", "list:0", "bare:0"], {"x": ONES})
    assert [each.tolist() for each in results] == [[[0.5] * 3] * 2] * 2 + [[1.0, 2.0]]
    for name in ("aten.nothing.default", "aten.add_.Tensor"):
        with pytest.raises(GraphError) as caught:
            graph.extend([node("n", name, "x:0 x:0")])
        assert caught.value.kind == "unknown_op"


def test_a_body_is_given_the_same_checks() -> None:
    loop = node(
        "w",
        "While",
        "x:0",
        cond=body("a", [], "a:0"),
        body=body("a", [node("m", "MatMul", "a:0 nix:0")], "m:0"),
    )

    with pytest.raises(GraphError) as caught:
        Graph([X, loop])

    assert caught.value.kind in ("mismatch", "not_found")
