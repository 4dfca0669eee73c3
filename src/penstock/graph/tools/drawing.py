"""A graph as a drawing in the DOT language, which Graphviz turns into SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Node, Subgraph

_SHAPES = {
    "Placeholder": "ellipse",
    "Constant": "ellipse",
    "Variable": "cylinder",
    "While": "box3d",
    "Cond": "diamond",
}


def to_dot(graph: Graph) -> str:
    """Return the drawing of a graph: name scopes and subgraphs as boxes, control edges dashed."""
    lines = ["digraph graph {", "  rankdir=BT;", '  node [shape=box, fontname="sans-serif"];']
    lines += _nodes(list(graph.nodes.values()), "", "  ")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _nodes(nodes: list[Node], prefix: str, indent: str, args: Sequence[str] = ()) -> Iterator[str]:
    scopes: dict[str, list[Node]] = {}
    for node in nodes:
        scopes.setdefault(node.name.rpartition("/")[0], []).append(node)
    for scope, members in scopes.items():
        inner = indent
        if scope:
            yield f"{indent}subgraph {_quoted(f'cluster {prefix}{scope}')} {{"
            inner = indent + "  "
            yield f"{inner}label={_quoted(scope)};"
        for node in members:
            yield from _node(node, prefix, inner)
        if scope:
            yield f"{indent}}}"
    known = {node.name for node in nodes} | set(args)
    for node in nodes:
        for endpoint in node.inputs:
            # What a subgraph takes from outside has the outer name.
            source = prefix + endpoint.node if endpoint.node in known else endpoint.node
            yield f"{indent}{_quoted(source)} -> {_quoted(prefix + node.name)} [label={_quoted(str(endpoint.port))}];"
        for name in node.controls:
            source = prefix + name if name in known else name
            yield f"{indent}{_quoted(source)} -> {_quoted(prefix + node.name)} [style=dashed];"


def _node(node: Node, prefix: str, indent: str) -> Iterator[str]:
    kind = "" if node.op in node.name else f"\n{node.op}"
    shapes = "".join(f"\n{spec}" for spec in node.outputs[:4])
    label = f"{node.name.rpartition('/')[2]}{kind}{shapes}" + (f"\n{node.device}" if node.device else "")
    text = _quoted(label).replace("\n", "\\n")
    yield f"{indent}{_quoted(prefix + node.name)} [label={text}, shape={_SHAPES.get(node.op, 'box')}];"
    for name, subgraph in node.subgraphs():
        yield from _subgraph(name, subgraph, f"{prefix}{node.name}/", indent)


def _subgraph(name: str, subgraph: Subgraph, prefix: str, indent: str) -> Iterator[str]:
    # Both subgraphs of a node may use the same names.
    inner = f"{prefix}{name}/"
    yield f"{indent}subgraph {_quoted(f'cluster {inner}')} {{"
    yield f"{indent}  label={_quoted(inner.rstrip('/'))};"
    for arg in subgraph.args:
        yield f"{indent}  {_quoted(inner + arg)} [label={_quoted(arg)}, shape=ellipse];"
    yield from _nodes(list(subgraph.nodes.values()), inner, indent + "  ", subgraph.args)
    yield f"{indent}}}"
