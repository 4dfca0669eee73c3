"""What a graph's text keeps, and what Extend refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each
from tests.graph.graphs import body, constant, evaluate, node

from penstock.graph import Graph, GraphError, Session, gradients
from penstock.graph.errors import InfeasibleError

TYPES: dict[str, Any] = {
    "float32": np.array([[-0.0, np.nan, np.inf], [-np.inf, 1e-45, 3.4028235e38]], np.float32),
    "float64": np.array([-0.0, np.nan, 5e-324, 0.1]),
    "int8": np.array([-128, 127], np.int8),
    "int16": np.array([-(2**15), 2**15 - 1], np.int16),
    "int32": np.array(2**31 - 1, np.int32),
    "int64": np.array([-(2**63), 2**63 - 1]),
    "uint8": np.zeros((0, 3), np.uint8),
    "bytes": np.array([b"\xff\x00", b"", b"a\x00"], object),
    "bool": np.array([True, False]),
    "complex64": np.array([complex(-0.0, np.nan), complex(np.inf, 1)], np.complex64),
    "qint8": np.array([-128, 127], np.int8),
    "quint8": np.array([[255]], np.uint8),
    "qint32": np.zeros((2, 0), np.int32),
}


def same_bits(one: Any, other: Any) -> bool:
    if one.dtype == object:
        return bool(one.shape == other.shape and one.tolist() == other.tolist())
    same: bool = (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return same


@for_each("dtype", TYPES)
def test_every_type_is_fed_held_saved_restored_and_kept_as_json_bit_for_bit(
    dtype: str, tmp_path: Any
) -> None:
    array, path = TYPES[dtype], str(tmp_path / "saved")
    graph = Graph(
        [
            node("x", "Placeholder", dtype=dtype, shape=list(array.shape)),
            node("v", "Variable", dtype=dtype, shape=list(array.shape)),
            node("set", "Assign", "v:0 x:0"),
            node("get", "Read", "v:0"),
            node("save", "Save", "get:0", names=["a/b"], path=path),
            node("back", "Restore", tensor="a/b", dtype=dtype, path=path),
        ]
    )
    graph.constant(array, dtype=dtype, name="c")
    text = graph.to_json()

    read = Graph.from_json(text)
    with Session(read) as session:
        session.run("set", {"x": array})
        results = session.run(["get:0", "v:0", "c:0"])
        session.run("save")
        results.append(session.run("back:0"))

    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no strict JSON"))
    assert read.to_json() == text
    for result in results[:-2] + results[-1:]:
        assert same_bits(result, array)
    # A NaN of JSON has no payload.
    assert np.array_equal(results[2], array, equal_nan=dtype in ("float32", "float64", "complex64"))
    if dtype == "float64":
        assert np.signbit(results[2][0])


def test_nodes_come_in_any_order_and_keep_where_they_were_made() -> None:
    nodes = [
        node("sum", "Add", "a:0 b:0", where="model.py:7"),
        constant("a", 1.0),
        constant("b", 2.0, group="g", only="cpu", cost={"cpu:0": 1.5}, bytes=4),
    ]
    graph = Graph(nodes)

    assert evaluate(nodes, "sum:0") == 3.0
    written = {each["name"]: each for each in json.loads(graph.to_json())["nodes"]}
    assert written["sum"]["where"] == "model.py:7"
    assert written["b"]["cost"] == {"cpu:0": 1.5}
    assert written["b"]["group"] == "g"


PLACES: dict[str, Any] = {"cotangents": [0], "wrt": [9]}
DROPOUT = {
    "op": "aten.dropout.default",
    "attr": {"args": [{"input": 0}, 0.5, True]},
    "inputs": 1,
    "outputs": 1,
    "device": "",
}
REFUSED = {
    "unknown operation": ([node("n", "Adds", "x:0 x:0")], "unknown_op", "Add"),
    "unknown attribute": ([node("n", "Sum", "x:0", axes=0)], "mismatch", "axis"),
    "missing attribute": ([node("n", "Concat", "x:0 x:0")], "mismatch", "axis"),
    "duplicate": ([node("n", "Neg", "x:0"), node("n", "Neg", "x:0")], "duplicate", "n"),
    "there already": ([node("x", "Neg", "k:0")], "duplicate", "x"),
    "cycle": ([node("n", "Neg", "m:0"), node("m", "Neg", "n:0")], "cycle", "n"),
    "input": ([node("n", "Neg", "xx:0")], "not_found", "xx"),
    "port": ([node("n", "Neg", "x:1")], "not_found", "x:1"),
    "control": ([node("n", "Neg", "x:0", ctrl=["y"])], "not_found", "y"),
    "dtypes": ([node("n", "Add", "x:0 k:0")], "mismatch", "int32"),
    "shapes": ([constant("b", [1.0, 2.0]), node("n", "Add", "x:0 b:0")], "mismatch", "[?, 3]"),
    "quantised": (
        [
            node("q", "Placeholder", dtype="qint8", shape=[3]),
            node("p", "Placeholder", dtype="int8", shape=[3]),
            node("n", "Concat", "q:0 p:0", axis=0),
        ],
        "mismatch",
        "qint8",
    ),
    "number of inputs": ([node("n", "Add", "x:0")], "mismatch", "2 inputs"),
    "slice": ([node("n", "Slice", "x:0", begin=[0, 2], size=[1, 2])], "mismatch", "axis 1"),
    "split": ([node("n", "Split", "x:0", axis=1, num=2)], "mismatch", "2 does not divide"),
    "not square": ([constant("b", [[1.0, 2.0]]), node("n", "MatrixInverse", "b:0")], "mismatch", "square"),
    "body": (
        [
            node(
                "n",
                "While",
                "k:0",
                cond=body("i", [constant("t", True, "bool")], "t:0"),
                body=body("i", [constant("f", 1.0)], "f:0"),
            )
        ],
        "mismatch",
        "carry 0",
    ),
    "carries": (
        [
            node(
                "n",
                "While",
                "k:0",
                cond=body("i", [constant("t", True, "bool")], "t:0"),
                body=body("i", [], ""),
            )
        ],
        "mismatch",
        "0 values",
    ),
    "branches": (
        [
            constant("p", True, "bool"),
            node("n", "Cond", "p:0", then=body("", [], "x:0"), else_=body("", [], "k:0")),
        ],
        "mismatch",
        "result 0",
    ),
    "name": ([node("a:b", "Neg", "x:0")], "mismatch", "colon"),
    "data": (
        [node("n", "Constant", value={"dtype": "int8", "shape": [2], "data": [1, 300]})],
        "mismatch",
        "int8",
    ),
    "no value": ([node("n", "Constant", value=5)], "mismatch", "dtype, shape, data"),
    "no gradient": (
        [
            node(
                "n",
                "Vjp",
                "x:0 x:0",
                of={"op": "Neg", "attr": {}, "inputs": 1, "outputs": 1, "device": ""},
                **PLACES,
            )
        ],
        "mismatch",
        "Vjp",
    ),
    "a draw in a gradient": (
        [
            node(
                "n",
                "Vjp",
                "x:0 x:0 x:0",
                of={
                    "op": "Vjp",
                    "attr": {"of": DROPOUT, "cotangents": [0], "wrt": [0]},
                    "inputs": 2,
                    "outputs": 1,
                    "device": "",
                },
                **PLACES,
            )
        ],
        "unsupported",
        "draws",
    ),
    "size": (
        [node("n", "Constant", value={"dtype": "int8", "shape": [10**12], "data": [1]})],
        "mismatch",
        "elements",
    ),
}


@for_each("case", REFUSED)
def test_what_is_refused_names_its_node_and_adds_nothing(case: str) -> None:
    nodes, kind, part = REFUSED[case]
    graph = Graph([node("x", "Placeholder", dtype="float32", shape=[None, 3]), constant("k", 1, "int32")])
    before = graph.to_json()

    with pytest.raises(GraphError) as caught:
        graph.extend([{**each, "where": f"model.py:{line}"} for line, each in enumerate(nodes)])

    assert caught.value.kind == kind
    assert part in str(caught.value)
    assert caught.value.node in str(caught.value)
    assert "model.py:" in str(caught.value)
    assert graph.to_json() == before


@for_each(
    "text",
    [
        "[" * 100_000,
        '{"penstock_graph": 9, "nodes": []}',
        "[1]",
        '[{"name": "a"}]',
        '[{"name": "a", "op": "NoOp", "attr": []}]',
        "[NaN]",
        '{"a": 1, "a": 2}',
        "nothing",
    ],
)
def test_hostile_text_is_an_error_of_a_graph(text: str) -> None:
    with pytest.raises(GraphError):
        Graph.from_json(text)


def test_subgraphs_that_are_nested_too_deep_are_refused() -> None:
    inner = [constant("c", 1.0)]
    for _ in range(60):
        inner = [
            constant("p", True, "bool"),
            node("n", "Cond", "p:0", then=body("", inner, ""), else_=body("", [], "")),
        ]

    with pytest.raises(GraphError, match="deep"):
        Graph(inner)


def test_python_programs_name_the_line_that_made_a_node() -> None:
    graph = Graph()
    x = graph.placeholder("float32", [3], name="x")

    with graph.name_scope("layer"), pytest.raises(GraphError, match=r"test_graph_json_and_checks\.py:\d+"):
        graph.add("MatMul", x, x, name="product")

    assert (x + 1.0).name == "Add:0"
    with pytest.raises(GraphError, match=r"'float3'.*one of float32"):
        graph.constant(1.0, dtype="float3")


#: x to the power of three by a loop of two rounds, its body naming an argument and a node of the function.
POWER = body(
    "x",
    [
        constant("zero", 0, "int32"),
        constant("two", 2, "int32"),
        node("i", "Identity", "zero"),
        node(
            "loop",
            "While",
            "i x",
            cond=body("i y", [node("t", "Greater", "two i")], "t"),
            body=body(
                "i y",
                [constant("one", 1, "int32"), node("j", "Add", "i one"), node("z", "Mul", "y x")],
                "j z",
            ),
        ),
        node("done", "NoOp", ctrl=["loop"]),
    ],
    "loop:1 x",
)


def test_a_function_as_text_is_called_as_often_as_one_likes() -> None:
    graph = Graph()
    x = graph.placeholder("float32", [], name="x")
    cube, same = graph.call(json.dumps(POWER), x, name="cube")
    ninth, _ = graph.call(POWER, cube, name="cube")
    inside, _ = graph.cond(x > 0.0, lambda a: graph.call(POWER, a, name="cube"), lambda a: (a, a), [x])
    (slope,) = gradients(graph, ninth, [x])
    assert (same.name, cube.name, ninth.name) == ("x:0", "cube/loop:1", "cube_1/loop:1")
    assert graph.nodes["cube_1/done"].controls == ["cube_1/loop"]
    again = Graph.from_json(graph.to_json())
    assert slope is not None

    with Session(again) as session:
        fetches = [cube.name, ninth.name, inside.name, slope.name]
        assert session.run(fetches, {"x": np.float32(2)}) == [8, 512, 8, 9 * 256]


FUNCTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "too few inputs": (body("x y", [], "x"), "mismatch", "takes 2 inputs, and 1 are given"),
    "no function": ({"args": []}, "mismatch", "has args, nodes and out"),
    "a port that an argument has not": (body("x", [], "x:1"), "not_found", "'x:1' is not there"),
    "a result that is not there": (
        body("x", [node("n", "Neg", "x")], "m"),
        "not_found",
        "'m:0' is not there",
    ),
    "one name for an argument and a node": (
        body("x", [node("x", "Neg", "x")], "x"),
        "duplicate",
        "has 'x' twice",
    ),
    "a node that is refused": (body("x", [node("n", "Neg", "nope")], "n"), "not_found", "nope"),
    "a body that hides an input": (
        body(
            "x",
            [node("c", "Cond", "p", then=body("", [constant("a", 1)], "x"), else_=body("", [], "x"))],
            "c",
        ),
        "duplicate",
        "has the name 'a', which is one outside",
    ),
}


@for_each("case", FUNCTIONS)
def test_a_function_that_is_refused_adds_nothing(case: str) -> None:
    function, kind, words = FUNCTIONS[case]
    graph = Graph([constant("a", 1.0), constant("p", True, "bool")])
    before = graph.to_json()

    # A value becomes a node of another name, which that body does not hide.
    for given in ("a:0",) if "hides" in case else ("a:0", 2.0):
        with pytest.raises(GraphError, match=words) as caught:
            graph.call(function, given)
        assert (caught.value.kind, graph.to_json()) == (kind, before)


def test_feeds_that_are_no_mapping_are_refused() -> None:
    with (
        Session(Graph([constant("a", 1.0)])) as session,
        pytest.raises(GraphError, match="arrays by edge or text"),
    ):
        session.run("a:0", np.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "meant"), [("Relu", "did you mean 'ReLU', "), ("relu", "'ReLU'"), ("MATMUL", "'MatMul'")]
)
def test_an_operation_in_another_case_is_the_first_that_an_error_names(written: str, meant: str) -> None:
    with pytest.raises(GraphError, match=f"there is no operation '{written}'; .*{meant}"):
        Graph().add(written, 1.0)


@pytest.mark.parametrize(
    "asked",
    [
        "gpu",
        "GPU:0",
        "npu:0",
        "/NPU",
        "cpu:1",
        "/device:GPU:0",
        "/job:a/task:0/device:cuda:1",
        "/job:a/device:cpu:1",
    ],
)
def test_a_session_in_one_process_refuses_a_node_for_another_device(asked: str) -> None:
    """It ran it on the CPU, and said nothing. Nodes that a run does not need may ask for anything."""
    graph = Graph()
    x = graph.placeholder("float32", [], name="x")
    graph.add("Exp", x, name="loose")
    graph.add("Neg", x, name="asks", device=asked)
    graph.add("Neg", x, name="only", placement={"only": asked})
    _, looped = graph.while_loop(
        lambda i, _: i < 2, lambda i, a: (i + 1, graph.add("Neg", a, device=asked)), [0, x], name="loop"
    )
    with Session(graph) as session:
        assert session.run("loose:0", {x: 0.0}) == 1
        for name, fetch in (("asks", "asks:0"), ("only", "only:0"), ("loop", looped)):
            with pytest.raises(InfeasibleError) as caught:
                session.run(fetch, {x: 1.0})
            assert (caught.value.node, caught.value.where != "") == (name, True)
            assert f"asks for {asked!r}, and this process has /device:cpu:0" in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    ["cpu", "CPU:0", "/cpu:0", "ps", "/job:ps", "task:7", "/job:ps/task:1/device:cpu:0", "/device:CPU:0"],
)
def test_a_process_alone_is_every_job_and_task(asked: str) -> None:
    graph = Graph()
    graph.add("Neg", graph.constant(1.0), name="n", device=asked)
    with Session(graph) as session:
        assert session.run("n:0") == -1


def test_the_inner_of_two_devices_holds_alone() -> None:
    graph = Graph()
    with graph.on_device("/job:a/task:0"):
        with graph.on_device("cpu"):
            inner = graph.constant(1.0)
        outer = graph.constant(1.0)

    assert [graph.nodes[each.endpoint.node].device for each in (inner, outer)] == ["cpu", "/job:a/task:0"]
