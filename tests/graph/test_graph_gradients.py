"""Gradients against PyTorch's, of any order, through loops and conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.graph.graphs import body, constant, node

from penstock.graph import Graph, GraphError, Session, Statistics, UnsupportedError, gradients

F = "float64"


def check(
    nodes: list[dict[str, Any]], y: str, reference: Callable[..., torch.Tensor], feeds: dict[str, Any]
) -> None:
    """Compare gradients of first and second order with PyTorch's, with regions and without, and after JSON."""
    graph = Graph(nodes)
    first = gradients(graph, y, list(feeds))
    known = [each for each in first if each is not None]
    # The second derivative along the first: a sum of all its elements.
    second = gradients(graph, known, list(feeds))
    values = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in feeds.items()
    }
    ones = torch.autograd.grad(
        reference(**values).sum(), list(values.values()), create_graph=True, allow_unused=True
    )
    total = sum(each.sum() for each in ones if each is not None)
    assert isinstance(total, torch.Tensor)
    twos: Any = [None] * len(values)
    if total.requires_grad:
        twos = torch.autograd.grad(total, list(values.values()), allow_unused=True)
    again = Graph.from_json(graph.to_json())
    assert again.to_json() == graph.to_json()
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    for each, regions in ((graph, True), (again, False)):
        with Session(each, regions=regions) as session:
            fetches = [edge.name for edge in (*first, *second) if edge is not None]
            results = iter(session.run(fetches, arrays))
            for edge, expected in zip((*first, *second), (*ones, *twos), strict=True):
                if edge is not None:
                    wanted = 0 if expected is None else expected.detach().numpy()
                    np.testing.assert_allclose(next(results), wanted, rtol=1e-9, atol=1e-12)
                else:
                    assert expected is None or not expected.any()


def given(*shapes: list[int]) -> list[dict[str, Any]]:
    return [node("xyz"[place], "Placeholder", dtype=F, shape=shape) for place, shape in enumerate(shapes)]


A = np.array([[1.5, 0.5], [0.25, 2.0]])
B = np.array([0.5, 1.25])
LAYER_NORM = "aten.native_layer_norm.default"
NORM_OF = [{"input": 0}, [2], {"input": 1}, {"input": 2}, 0.5]


def _norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, [2], weight, bias, 0.5)


BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_OF = [*({"input": place} for place in range(5)), True, 0.1, 0.5]
NONE_OF = [{"input": 0}, None, None]


def _batch_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, 0.5)


OPERATIONS: dict[str, tuple[list[dict[str, Any]], Callable[..., torch.Tensor]]] = {
    "Add": ([node("o", "Add", "x:0 y:0")], lambda x, y: x + y),
    "Sub": ([node("o", "Sub", "y:0 x:0")], lambda x, y: y - x),
    "Mul": ([node("o", "Mul", "x:0 y:0")], lambda x, y: x * y),
    "twice the same": ([node("o", "Mul", "x:0 x:0")], lambda x, y: x * x),
    "Div": ([node("o", "Div", "x:0 y:0")], lambda x, y: x / y),
    "MatMul": ([node("o", "MatMul", "x:0 x:0")], lambda x, y: x @ x),
    "MatrixInverse": ([node("o", "MatrixInverse", "x:0")], lambda x, y: torch.linalg.inv(x)),
    "MatrixDeterminant": ([node("o", "MatrixDeterminant", "x:0")], lambda x, y: torch.linalg.det(x)),
    "SoftMax": (
        [node("s", "SoftMax", "x:0"), node("o", "Mul", "s:0 y:0")],
        lambda x, y: torch.softmax(x, -1) * y,
    ),
    "Sigmoid": ([node("o", "Sigmoid", "x:0")], lambda x, y: torch.sigmoid(x)),
    "ReLU": ([node("o", "ReLU", "x:0")], lambda x, y: torch.relu(x)),
    "Log": ([node("o", "Log", "x:0")], lambda x, y: torch.log(x)),
    "Exp": ([node("e", "Exp", "x:0"), node("o", "Square", "e:0")], lambda x, y: torch.exp(2 * x)),
    "Sum": ([node("s", "Sum", "x:0", axis=0), node("o", "Mul", "s:0 y:0")], lambda x, y: x.sum(0) * y),
    "parts": (
        [
            node("p", "Split", "x:0", axis=0, num=2),
            node("c", "Slice", "x:0", begin=[0, 1], size=[2, 1]),
            node("j", "Concat", "x:0 c:0", axis=1),
            node("q", "Square", "j:0"),
            node("t", "Sum", "q:0"),
            node("o", "Mul", "p:1 t:0"),
        ],
        lambda x, y: x[1:] * torch.cat([x, x[:, 1:]], 1).square().sum(),
    ),
    "SoftMax of ATen": (
        [
            node("s", "aten.softmax.int", "x:0", args=[{"input": 0}, 0]),
            node("l", "aten.log_softmax.int", "s:0", args=[{"input": 0}, 1]),
            node("o", "Mul", "l:0 x:0"),
        ],
        lambda x, y: torch.log_softmax(torch.softmax(x, 0), 1) * x,
    ),
    "layer norm": (
        [
            node("n", LAYER_NORM, "x:0 y:0 y:0", args=NORM_OF),
            node("m", LAYER_NORM, "n:0 y:0", args=[*NORM_OF[:3], None, 0.5]),
            node("k", LAYER_NORM, "m:0", args=[*NORM_OF[:2], None, None, 0.5]),
            node("o", "Square", "k:0"),
        ],
        lambda x, y: _norm(_norm(_norm(x, y, y), y), None).square(),
    ),
    "batch norm": (
        [
            constant("mean", [0.0, 0.0], F),
            constant("variance", [1.0, 1.0], F),
            node("t", "MatMul", "x:0 x:0"),
            node("n", BATCH_NORM, "t:0 y:0 y:0 mean:0 variance:0", args=BATCH_NORM_OF),
            node("e", "Mul", "n:0 x:0"),
            node("m", "aten._native_batch_norm_legit.no_stats", "e:0", args=[*NONE_OF, True, 0.1, 0.5]),
            node("o", "Square", "m:0"),
        ],
        lambda x, y: _batch_norm(_batch_norm(x @ x, y, y) * x, None, None).square(),
    ),
    "attention": (
        [
            node("v", "aten.view.default", "x:0", args=[{"input": 0}, [1, 1, 2, 2]]),
            node("o", "aten.scaled_dot_product_attention.default", "v:0 v:0 v:0"),
        ],
        lambda x, y: (torch.softmax(x @ x.T / 2**0.5, -1) @ x)[None, None],
    ),
    "embedding": (
        [
            constant("i", [1, 0, 1], "int64"),
            node("e", "aten.embedding.default", "x:0 i:0"),
            node("o", "Square", "e:0"),
        ],
        lambda x, y: x[[1, 0, 1]].square(),
    ),
    "through integers": ([node("o", "Mul", "x:0 y:0"), node("s", "Shape", "x:0")], lambda x, y: x * y),
}


@for_each("name", OPERATIONS)
def test_gradients_of_operations_are_those_of_pytorch(name: str) -> None:
    nodes, reference = OPERATIONS[name]

    check([*given([2, 2], [2]), *nodes], "o:0", reference, {"x": A, "y": B})


@for_each("op", [LAYER_NORM, "aten.layer_norm.default"])
def test_the_third_derivative_of_a_norm_is_refused_as_pytorch_gives_a_wrong_one(op: str) -> None:
    graph = Graph([*given([2, 2], [2]), node("n", op, "x:0 y:0 y:0", args=NORM_OF)])
    total = graph.add("Square", "n:0")
    for _ in range(2):
        (slope,) = gradients(graph, total, ["x:0"])
        assert slope is not None
        total = graph.add("Square", slope)

    with pytest.raises(UnsupportedError, match=r"the third derivative of .*[lL]ayer"):
        gradients(graph, total, ["x:0"])
    if op == LAYER_NORM:
        with pytest.raises(UnsupportedError, match="no gradient of the mean"):
            gradients(graph, "n:1", ["x:0"])


def test_the_third_derivative_of_an_evaluated_batch_norm_is_right() -> None:
    """It is a*x + b. The derivative of a square, squared and derived twice more, is 128 a**7 (a*x + b)."""
    state = [
        constant(name, value, F) for name, value in (("a", [3.0]), ("b", [2.0]), ("m", [1.0]), ("v", [3.0]))
    ]
    args = [*({"input": place} for place in range(5)), 0.1, 1.0]
    op = "aten._native_batch_norm_legit_no_training.default"
    graph = Graph([*given([1, 1]), *state, node("n", op, "x:0 a:0 b:0 m:0 v:0", args=args)])
    total = graph.edge("n:0")
    for _ in range(3):
        (slope,) = gradients(graph, graph.add("Square", total), ["x:0"])
        assert slope is not None
        total = slope

    with Session(graph) as session:
        assert session.run(total, {"x:0": np.array([[0.5]])}) == pytest.approx(128 * 1.5**7 * 1.25)


def test_gradients_of_convolutions_and_pools() -> None:
    generator = np.random.default_rng(0)
    nodes = [
        *given([1, 4, 5, 2], [3, 3, 2, 3]),
        node("c", "Convolution2D", "x:0 y:0", strides=[1, 1], padding="SAME"),
        node("p", "MaxPool", "c:0", ksize=[2, 2], strides=[2, 2], padding="VALID"),
        node("o", "Square", "p:0"),
    ]

    def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        planes = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), y.permute(3, 2, 0, 1), padding=1)
        return torch.nn.functional.max_pool2d(planes, 2).square()

    check(
        nodes,
        "o:0",
        reference,
        {"x": generator.normal(size=(1, 4, 5, 2)), "y": generator.normal(size=(3, 3, 2, 3))},
    )


def steps(limit: str, inside: list[dict[str, Any]], out: str, start: str) -> list[dict[str, Any]]:
    """Return a While of a counter and one carry."""
    count = [constant("one", 1, "int32"), node("j", "Add", "i one")]
    return [
        constant("zero", 0, "int32"),
        constant("first", [1.0, 1.0], F),
        constant("limit", 4, "int32"),
        node(
            "w",
            "While",
            f"zero:0 {start}",
            cond=body("i a", [node("t", "Less", "i limit:0")] if limit == "count" else LESS, "t"),
            body=body("i a", [*count, *inside], f"j {out}"),
        ),
    ]


LESS = [node("s", "Sum", "a"), constant("many", 9.0, F), node("t", "Less", "s many")]
BRANCH = node(
    "c",
    "Cond",
    "big b",
    then=body("v", [node("k", "Mul", "v y:0"), node("l", "Exp", "k")], "k"),
    else_=body("v", [node("k", "Mul", "v x:0"), node("m", "Mul", "k k")], "m"),
)
LINEAR = [node("b", "Mul", "a y:0"), node("c", "Add", "b x:0")]


def iterate(
    x: torch.Tensor, y: torch.Tensor, step: Callable[..., torch.Tensor], start: Any = None
) -> torch.Tensor:
    a = torch.ones(2, dtype=torch.float64) if start is None else start
    for _ in range(4):
        a = step(a, x, y)
    return a


def until_large(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = x
    while a.sum() < 9:
        a = a * y + x
    return a


def branching(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    b = a + x
    return b * y if b.sum() > 2.5 else (b * x) ** 2


def nested(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = torch.ones(2, dtype=torch.float64)
    for _ in range(4):
        b = a
        for _ in range(4):
            b = b * y + x * b
        a = torch.sigmoid(b)
    return a


LOOPS: dict[str, tuple[list[dict[str, Any]], Callable[..., torch.Tensor]]] = {
    "constant first carry": (
        steps("count", LINEAR, "c", "first:0"),
        lambda x, y: iterate(x, y, lambda a, x, y: a * y + x),
    ),
    "trips that depend on the data": (steps("data", LINEAR, "c", "x:0"), until_large),
    "a capture that is also the carry": (
        steps("count", [node("c", "Mul", "a x:0")], "c", "x:0"),
        lambda x, y: iterate(x, y, lambda a, x, y: a * x, x),
    ),
    "a condition inside": (
        steps(
            "count",
            [
                node("b", "Add", "a x:0"),
                node("s", "Sum", "b"),
                constant("two", 2.5, F),
                node("big", "Greater", "s two"),
                BRANCH,
            ],
            "c",
            "first:0",
        ),
        lambda x, y: iterate(x, y, branching),
    ),
    "a loop inside": (
        steps(
            "count",
            [
                node(
                    "r",
                    "While",
                    "zero:0 a",
                    cond=body("k b", [node("t", "Less", "k limit:0")], "t"),
                    body=body(
                        "k b",
                        [
                            constant("one", 1, "int32"),
                            node("l", "Add", "k one"),
                            node("u", "Mul", "b y:0"),
                            node("v", "Mul", "x:0 b"),
                            node("z", "Add", "u v"),
                        ],
                        "l z",
                    ),
                ),
                node("c", "Sigmoid", "r:1"),
            ],
            "c",
            "first:0",
        ),
        nested,
    ),
}


@for_each("name", LOOPS)
def test_gradients_through_loops_are_those_of_pytorch_to_the_second_order(name: str) -> None:
    nodes, reference = LOOPS[name]

    check(
        [*given([2], [2]), *nodes], "w:1", reference, {"x": np.array([0.5, 0.75]), "y": np.array([0.9, 1.1])}
    )


def test_the_second_derivative_through_a_loop_with_a_constant_start_is_not_zero() -> None:
    """Five times x*w + 1 from 1: a polynomial, whose derivatives are known."""
    graph = Graph([node("w", "Placeholder", dtype=F, shape=[])])
    _, x = graph.while_loop(
        lambda i, x: i < 5,
        lambda i, x: (i + 1, x * graph.edge("w:0") + 1.0),
        [graph.constant(0), graph.constant(1.0, dtype=F)],
    )
    polynomial = np.polynomial.Polynomial([1.0] * 6)
    edges: list[Any] = [x]
    for _ in range(3):
        edges += gradients(graph, edges[-1], ["w:0"])
    with Session(graph) as session:
        results = session.run(edges, {"w": 0.5})

    np.testing.assert_allclose(results, [polynomial.deriv(order)(0.5) for order in range(4)], rtol=1e-12)


def test_a_body_takes_the_gradient_of_what_it_computed() -> None:
    graph = Graph()

    def double(i: Any, x: Any) -> Any:
        (slope,) = gradients(graph, x * x, [x])
        return i + 1, slope

    _, x = graph.while_loop(lambda i, x: i < 3, double, [graph.constant(0), graph.constant(1.0)])
    with Session(graph) as session:
        assert session.run(x) == 8


def test_both_branches_of_a_condition_and_what_is_connected_and_not_taken() -> None:
    cond = node(
        "o",
        "Cond",
        "p:0 x:0",
        then=body("v", [node("k", "Mul", "v v"), node("s", "Exp", "k")], "s"),
        else_=body("v", [node("k", "Sum", "y:0")], "k"),
    )
    pick = [node("t", "Sum", "x:0"), constant("zero", 0.0, F), node("p", "Greater", "t:0 zero:0")]

    def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * x) if x.sum() > 0 else y.sum()

    for value in (0.5, -0.5):
        check([*given([], [2]), *pick, cond], "o:0", reference, {"x": np.array(value), "y": B})


def test_what_is_not_connected_is_none_and_what_a_loop_never_used_is_zero() -> None:
    nodes = [
        *given([2], [2], [2]),
        node("v", "Variable", dtype=F, shape=[2]),
        node("set", "Assign", "v:0 x:0"),
        node("get", "Read", "v:0", ctrl=["set"]),
        node("unused", "Neg", "z:0"),
        *steps("count", LINEAR, "c", "get:0"),
    ]
    nodes = [each if each["name"] != "limit" else constant("limit", 0, "int32") for each in nodes]
    graph = Graph(nodes)
    variable, y, z, i = gradients(graph, "w:1", ["v:0", "y:0", "z:0", "zero:0"])
    assert variable is not None
    assert y is not None
    with Session(graph) as session:
        feeds = {"x": B, "y": B}
        assert session.run([variable, y], feeds)[0].tolist() == [1, 1]
        assert session.run(y, feeds).tolist() == [0, 0]

    assert z is None
    assert i is None
    with pytest.raises(GraphError, match="floats"):
        gradients(graph, "zero:0", ["x:0"])
    with pytest.raises(GraphError, match="'x'"):
        gradients(graph, "w:1", ["xx:0"])


def test_the_backward_pass_uses_the_draws_and_the_state_of_the_forward_pass() -> None:
    nodes = [
        *given([2]),
        node("v", "Variable", dtype=F, shape=[2]),
        node("set", "Assign", "v:0 x:0"),
        *steps(
            "count",
            [
                node("r", "RandomUniform", shape=[2], dtype=F),
                node("g", "Read", "v:0"),
                node("m", "Mul", "r g"),
                node("c", "Mul", "a m"),
            ],
            "c",
            "x:0",
        ),
    ]
    graph = Graph(nodes)
    (gradient,) = gradients(graph, "w:1", ["x:0"])
    statistics = Statistics()
    with Session(graph, seed=4) as session:
        session.run("set", {"x": B})
        value, slope = session.run(["w:1", gradient], {"x": B}, statistics=statistics)

    # The result is x times a product of draws and state, which the gradient is.
    np.testing.assert_allclose(slope, value / B, rtol=1e-12)
    assert statistics.kernels["w/r"] == statistics.kernels["w/g"] == 4


def test_gradients_through_switch_and_merge_made_by_hand_are_refused() -> None:
    graph = Graph(
        [
            *given([2]),
            constant("p", True, "bool"),
            node("s", "Switch", "x:0 p:0"),
            node("m", "Merge", "s:0 s:1"),
        ]
    )

    with pytest.raises(GraphError, match="Merge") as caught:
        gradients(graph, "m:0", ["x:0"])
    assert caught.value.kind == "unsupported"


def test_a_shuffle_is_differentiated_and_training_goes_down() -> None:
    graph = Graph()
    x = graph.placeholder("float32", [None, 3], name="x")
    w = graph.variable("float32", [3, 1], initial=np.zeros((3, 1), np.float32), name="w")
    start = graph.initialize_all()
    rows, _ = graph.add("Shuffle", x)
    error = graph.add("MatMul", rows, graph.add("Read", w)) - graph.add("Sum", rows, axis=1) * 0.0 - 1.0
    loss = graph.add("Sum", graph.add("Square", error))
    (slope,) = gradients(graph, loss, [w])
    assert slope is not None
    train = graph.add("AssignAdd", w, slope * -0.001)
    with Session(graph) as session:
        session.run(start)
        feeds = {x: np.random.default_rng(0).uniform(size=(4, 3)).astype(np.float32)}
        losses = [float(session.run([loss, train], feeds)[0]) for _ in range(20)]

    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow  # make_fx makes PyTorch import its Python kernels: several seconds
def test_traced_gradients_agree_with_untraced_ones() -> None:
    nodes, _ = OPERATIONS["SoftMax"]
    graph = Graph([*given([2, 2], [2]), *nodes])
    first = gradients(graph, "o:0", ["x:0", "y:0"])
    second = gradients(graph, [each for each in first if each is not None], ["x:0"])
    with Session(graph) as session:
        results = [session.run([*first, *second], {"x": A, "y": B}) for _ in range(12)]

    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13)
