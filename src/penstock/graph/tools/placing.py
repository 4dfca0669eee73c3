"""Where the nodes of a graph run, by their costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import ConfigError
from penstock.graph.errors import InfeasibleError, MismatchError, UnsupportedError
from penstock.graph.model.check import control_dependencies, dependencies, in_order, is_back_edge
from penstock.graph.model.dtypes import is_known
from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Node
from penstock.graph.ops.sizes import bytes_of, filled
from penstock.graph.ops.table import operation
from penstock.graph.ops.work import work_of
from penstock.graph.run.partition import BY_HAND, constraint_of, kind_of_flow, neighbours, to_one_device
from penstock.graph.run.reach import inner_nodes
from penstock.graph.run.regions import OUTLIVE_STEPS
from penstock.loader.setup import read_machine_file
from penstock.machine import Cluster, Machine
from penstock.policy.graph_pipeline import place_pipeline
from penstock.policy.graph_placement import (
    Devices,
    NoFeasibleDevice,
    PlacedNode,
    Placement,
    groups_of,
    is_allowed,
    place,
)
from penstock.policy.graph_search import place_searched
from penstock.store.calls import Calls
from penstock.units import format_bytes, format_flops


def place_graph(
    graph: Graph,
    devices: Devices | Sequence[str],
    *,
    default_cost_seconds: Mapping[str, float] | None = None,
    fixed: Mapping[str, str] | None = None,
    costs: Mapping[str, Mapping[str, Any]] | None = None,
    objective: str = "latency",
    brought: Mapping[str, Collection[tuple[str, str]]] | None = None,
) -> Placement:
    """Return the device and the simulated finish of each node, and the reason.

    devices: with their memory and links; or their names, in order of preference. Each node's `placement` has `cost`
    (seconds by device), `bytes` (of its output), `group` and `only`. default_cost_seconds: for nodes without a cost;
    None: what `work_of` estimates of each, at the devices' rates. fixed: where nodes are already. costs: by node,
    `cost` and `bytes` in place of what the node says, and `hop`: for how many seconds sending its output keeps both
    devices from other nodes. objective: "latency" of one step, by the white paper's greedy rule; "search": the same,
    improved by a search; "throughput" of steps that follow each other. brought: by device, what Call and NextBatch
    nodes find there: ("Call", name of a function), ("NextBatch", name of batches). What no device has may go to any.
    The reason for a choice ends with where the cost is from: measured (`costs`), given (by the node), default
    or estimated. A node that only initialises, see `only_initialising`, costs nothing unless it says a cost itself.
    Raises: InfeasibleError naming the node that no device can run; UnsupportedError for control flow that would have to
    run on several; MismatchError if a cost is no number, or a name no text.
    """
    devices = devices if isinstance(devices, Devices) else Devices(devices)
    nodes = placed_nodes(graph, devices, default_cost_seconds, costs, brought)
    return place_nodes(graph, nodes, devices, fixed=fixed, objective=objective)


def place_nodes(
    graph: Graph,
    nodes: Sequence[PlacedNode],
    devices: Devices,
    *,
    fixed: Mapping[str, str] | None = None,
    objective: str,
) -> Placement:
    """Return where `placed_nodes` of a graph run. Arguments, Raises: as `place_graph`."""
    if twice := [name for place, name in enumerate(devices.names) if name in devices.names[:place]]:
        raise MismatchError(f"the device {twice[0]!r} is named twice")
    if objective not in _RULES:
        raise MismatchError(f"objective is {objective!r:.40}; give one of {', '.join(_RULES)}")
    _check_flow(graph, nodes, devices.names, fixed or {})
    try:
        return _RULES[objective](nodes, devices, fixed=fixed)
    except NoFeasibleDevice as error:
        raise InfeasibleError(str(error), node=error.node, where=graph.nodes[error.node].where) from error
    except ConfigError as error:
        raise MismatchError(str(error)) from error


def _check_flow(
    graph: Graph, nodes: Sequence[PlacedNode], devices: Sequence[str], fixed: Mapping[str, str]
) -> None:
    """Refuse loops, conditions, and Switch and Merge made by hand that would have to run on several devices.

    Raises: UnsupportedError naming what is where.
    """
    rules = {name: rule for name, node in graph.nodes.items() if (rule := _rule_of(node))}
    if not rules:
        return
    groups = groups_of([replace(node, only=fixed.get(node.name) or node.only, group="") for node in nodes])
    # The first node of control flow of each group, by the group's first node.
    first_of = {groups[name][0].name: name for name in reversed(rules)}
    for first, name in first_of.items():
        asked = dict[str, str]()  # the first node of each device
        for member in groups[first]:
            if member.only:
                asked.setdefault(member.only, member.name)
        allowed = [{d for d in devices if is_allowed(d, only)} for only in asked]
        if allowed and all(allowed) and not set.intersection(*allowed):
            there = [f"{each!r} on {only!r}" for only, each in asked.items()]
            raise UnsupportedError(
                f"{rules[name]}, and these are on several: {', '.join(there)}; {to_one_device(next(iter(asked)))}",
                node=name,
                where=graph.nodes[name].where,
            )


def _rule_of(node: Node) -> str:
    """Return what has to be on one device with a node of control flow; "" for another node."""
    if node.op in BY_HAND:
        return f"{node.op} made by hand runs on one device, with all that follows from it"
    if any(True for _ in node.subgraphs()):
        return f"a {kind_of_flow(node)} runs on one device, with the variables that its nodes change"
    return ""


_RULES = {"latency": place, "search": place_searched, "throughput": place_pipeline}


def read_devices(machine: Machine | str | os.PathLike[str] | None) -> Devices | None:
    """Return the devices and links of a machine, or of its file, which need not say what else a machine has.

    Raises: DataError if the file cannot be read; ConfigError naming the file and the field that is wrong, or what is
        neither a machine nor a path.
    """
    if machine is None:
        return None
    if isinstance(machine, Machine):
        return devices_of(machine.cluster)
    return devices_of(read_machine_file(machine, Calls(), Cluster.from_toml))


def devices_of(machine: Cluster) -> Devices:
    """Return a machine's devices and links."""
    links = {each.between: (each.latency_seconds, each.bytes_per_second) for each in machine.links}

    def known(field: str) -> dict[str, float]:
        return {each.name: amount for each in machine.devices if (amount := getattr(each, field)) is not None}

    return Devices(
        [each.name for each in machine.devices],
        bytes_per_second=machine.network_bytes_per_second,
        links=links | {(other, one): link for (one, other), link in links.items()},
        memory_bytes=known("memory_bytes"),
        flops_per_second=known("flops_per_second"),
        memory_bytes_per_second=known("memory_bytes_per_second"),
    )


def placed_nodes(
    graph: Graph,
    devices: Devices,
    default_cost_seconds: Mapping[str, float] | None = None,
    costs: Mapping[str, Mapping[str, Any]] | None = None,
    brought: Mapping[str, Collection[tuple[str, str]]] | None = None,
) -> list[PlacedNode]:
    """Return what a placement knows of the nodes of a graph. Arguments, Raises: as `place_graph`."""
    beside, initial = neighbours(graph), only_initialising(graph)
    nothing = dict.fromkeys(devices.names if default_cost_seconds is None else default_cost_seconds, 0.0)
    return [
        _placed(
            graph,
            node,
            devices,
            nothing if node.name in initial else default_cost_seconds,
            {} if node.name in initial else (costs or {}).get(node.name, {}),
            beside[node.name],
            *_have(node, brought or {}),
        )
        for node in graph.nodes.values()
    ]


def only_initialising(graph: Graph) -> set[str]:
    """Return the nodes that give variables their first values, and those that only these need: no step runs them.

    They are Assigns of values that come from constants and draws alone, where nothing needs them but a NoOp of such
    Assigns, as `initialize_all` adds it.
    """
    order = in_order(graph.nodes)
    untrained, users = set[str](), dict[str, list[str]]()
    for node in order:
        takes, controls = [endpoint.node for endpoint in dependencies(node)], list(control_dependencies(node))
        for name in (*takes, *controls):
            users.setdefault(name, []).append(node.name)
        may_be = operation(node.op).kind in ("pure", "random") or (node.op == "NoOp" and controls)
        if node.op == "Assign":  # of a variable, and a value
            may_be, takes = True, takes[1:]
        if may_be and untrained.issuperset((*takes, *controls)):
            untrained.add(node.name)
    found = set[str]()
    for node in reversed(order):
        is_last = node.op in ("Assign", "NoOp") and node.name in untrained
        if found.issuperset(users[node.name]) if node.name in users else is_last:
            found.add(node.name)
    return found


def _have(node: Node, brought: Mapping[str, Collection[tuple[str, str]]]) -> tuple[list[str], str]:
    """Return the devices that have all functions and batches that a node and those in its bodies name, and these."""
    named = {(each.op, each.attr[_NAMED_BY[each.op]]) for each in inner_nodes(node) if each.op in _NAMED_BY}
    have = [device for device, names in brought.items() if named <= set(names)] if named else []
    needs = " and ".join(f"the {_NAMED_BY[op]} {name!r}" for op, name in sorted(named)) if have else ""
    return have, needs


#: Where a node says what it takes of what its worker brings.
_NAMED_BY = {"Call": "function", "NextBatch": "batches"}


def is_amount(value: Any) -> bool:
    """Return whether a value is a finite number of zero or more."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _placed(
    graph: Graph,
    node: Node,
    devices: Devices,
    default: Mapping[str, float] | None,
    measured: Mapping[str, Any],
    beside: tuple[str, ...],
    have: Sequence[str],
    needs: str,
) -> PlacedNode:
    given = {**node.placement, **measured}
    cost, basis = given.get("cost", default), "cost default"
    if "cost" in given:
        basis = "cost measured" if "cost" in measured else "cost given"
    if cost is None:
        cost, basis = _estimated(node, devices)
    nbytes = given.get("bytes", sum(map(bytes_of, filled(node.outputs))))
    hop = given.get("hop", 0)
    is_cost = isinstance(cost, Mapping) and all(map(is_amount, cost.values()))
    group, only = given.get("group") or "", given.get("only") or node.device
    problem = ""
    if not is_cost or not is_amount(nbytes):
        problem = f"cost is {cost!r:.80} and bytes {nbytes!r:.40}; give seconds by device, and a number"
    elif not is_amount(hop):
        problem = f"hop is {hop!r:.40}; give seconds"
    elif not isinstance(group, str) or not isinstance(only, str):
        problem = f"group is {group!r:.40} and only {only!r:.40}; give texts"
    if problem:
        raise MismatchError(problem, node=node.name, where=node.where)
    return PlacedNode(
        node.name,
        tuple(
            name
            for name in dict.fromkeys(endpoint.node for endpoint in dependencies(node))
            if not is_back_edge(graph.nodes[name], node)
        ),
        tuple(dict.fromkeys(control_dependencies(node))),
        {device: seconds for device, seconds in cost.items() if device in have} if have else dict(cost),
        float(nbytes),
        group,
        constraint_of(node),
        beside,
        _state_bytes(node),
        needs,
        float(hop),
        basis,
        _passes_on(node),
    )


def _estimated(node: Node, devices: Devices) -> tuple[dict[str, float], str]:
    """Return the seconds of a node on each device by its operation and shapes, and what that is from."""
    try:
        work = work_of(node)
    except MismatchError as error:
        raise MismatchError(error.text, node=node.name, where=node.where) from error
    seconds = {each: devices.kernel_seconds(each, work.flops, work.nbytes) for each in devices.names}
    said = [format_flops(work.flops), format_bytes(work.nbytes), *sorted(work.unknown)]
    return seconds, f"cost estimated: {', '.join(said)}"


def _passes_on(node: Node) -> bool:
    """Return whether a node gives what it takes, or what outlives a step. A feed is neither."""
    table = operation(node.op)
    is_free = table.flops is None or (table.kind == "control" and not any(node.subgraphs()))
    return is_free and (bool(node.inputs) or node.op in OUTLIVE_STEPS)


def _state_bytes(node: Node) -> float:
    """Return the bytes of what a variable holds, as far as its shape is known."""
    is_counted = node.op == "Variable" and is_known(node.outputs[0].shape)
    return float(bytes_of(node.outputs[0])) if is_counted else 0.0
