"""Where the nodes of a graph run, by their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError
from penstock.graph.errors import InfeasibleError, MismatchError
from penstock.graph.model.check import control_dependencies, dependencies
from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Node
from penstock.policy.graph_placement import NoFeasibleDevice, PlacedNode, Placement, place


def place_graph(
    graph: Graph,
    devices: Sequence[str],
    *,
    latency_seconds: float = 0.0,
    bytes_per_second: float = float("inf"),
    default_cost_seconds: Mapping[str, float] | None = None,
) -> Placement:
    """Return the device and the simulated finish of each node, and the reason, by the greedy rule.

    devices: in order of preference. Each node's `placement` has `cost` (seconds by device), `bytes` (of its output),
    `group` and `only`. default_cost_seconds: for nodes without a cost; None: no time on any device.
    Raises: InfeasibleError naming the node that no device can run; MismatchError if a cost is no number, or a name
    no text.
    """
    default = dict.fromkeys(devices, 0.0) if default_cost_seconds is None else dict(default_cost_seconds)
    nodes = [_placed(node, default) for node in graph.nodes.values()]
    try:
        return place(nodes, devices, latency_seconds, bytes_per_second)
    except NoFeasibleDevice as error:
        raise InfeasibleError(str(error), node=error.node, where=graph.nodes[error.node].where) from error
    except ConfigError as error:
        raise MismatchError(str(error)) from error


def _placed(node: Node, default: Mapping[str, float]) -> PlacedNode:
    given = node.placement
    cost, nbytes = given.get("cost", default), given.get("bytes", 0)
    is_cost = isinstance(cost, Mapping) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        for value in cost.values()
    )
    group, only = given.get("group") or "", given.get("only") or node.device
    problem = ""
    if not is_cost or isinstance(nbytes, bool) or not isinstance(nbytes, int | float) or nbytes < 0:
        problem = f"cost is {cost!r:.80} and bytes {nbytes!r:.40}; give seconds by device, and a number"
    elif not isinstance(group, str) or not isinstance(only, str):
        problem = f"group is {group!r:.40} and only {only!r:.40}; give texts"
    if problem:
        raise MismatchError(problem, node=node.name, where=node.where)
    return PlacedNode(
        node.name,
        tuple(dict.fromkeys(endpoint.node for endpoint in dependencies(node))),
        tuple(dict.fromkeys(control_dependencies(node))),
        dict(cost),
        float(nbytes),
        group,
        only,
    )
