"""What a node computes and moves, by its operation and its shapes: an estimate, for what nobody has measured.

Source: Abadi et al. 2015, section 3.2.1 ("statically estimated based on heuristics associated with different operation
types").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.graph.model.dtypes import is_known
from penstock.graph.model.node import Node, Subgraph
from penstock.graph.ops.sizes import UNKNOWN_SIZE, bytes_of, filled
from penstock.graph.ops.table import operation


@dataclass(frozen=True, slots=True)
class Work:
    """What a node does once.

    flops: additions, multiplications and the like. nbytes: that it reads and writes. unknown: what had to be guessed.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    unknown: frozenset[str] = frozenset()

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.nbytes + other.nbytes, self.unknown | other.unknown)


def work_of(node: Node) -> Work:
    """Return what a node of a checked graph does; of a loop or condition, with what its bodies do.

    A loop runs `UNKNOWN_SIZE` times, and a condition takes the branch that computes more.
    """
    bodies = [_work_of_body(subgraph) for _, subgraph in node.subgraphs()]
    if node.op == "While":
        once = sum(bodies, Work())
        trips = f"a loop counts as {UNKNOWN_SIZE} iterations"
        return Work(once.flops * UNKNOWN_SIZE, once.nbytes * UNKNOWN_SIZE, once.unknown | {trips})
    if node.op == "Cond":
        return max(bodies, key=lambda each: (each.flops, each.nbytes))
    table = operation(node.op)
    if table.kind == "control" or table.flops is None:
        return Work()
    takes, gives = filled(node.takes), filled(node.outputs)
    flops, nbytes = table.flops(node, takes, gives), sum(map(bytes_of, (*takes, *gives)))
    return Work(flops, nbytes, frozenset(_unknown(node)))


def _work_of_body(subgraph: Subgraph) -> Work:
    return sum(map(work_of, subgraph.nodes.values()), Work())


def _unknown(node: Node) -> Iterator[str]:
    specs = [spec for spec in (*node.takes, *node.outputs) if spec.kind in ("tensor", "variable")]
    if not all(is_known(spec.shape) for spec in specs):
        yield f"an open size counts as {UNKNOWN_SIZE}"
    if any(spec.dtype == "bytes" for spec in specs):
        yield "byte strings count as empty"
    if node.op == "Call":
        yield "a function counts by its elements"
