"""What nodes cost, from what was recorded: a trace of a graph's runs, or JSON that an earlier session or command wrote.

Source: Abadi et al. 2015, section 10 ("learn how to make good placement decisions").
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.graph.errors import MismatchError
from penstock.graph.model.graph import Graph
from penstock.graph.ops.table import operation
from penstock.graph.ops.work import work_of
from penstock.graph.run.timeline import members_of
from penstock.graph.tools.placing import is_amount
from penstock.policy.graph_placement import Devices
from penstock.trace import NO_FLOW, Kind, Trace, read_trace
from penstock.units import format_names

#: Of a trace of one process, which says nothing of devices.
_ONE_PROCESS = "cpu:0"


def read_costs(graph: Graph, path: str | os.PathLike[str], devices: Devices) -> dict[str, dict[str, Any]]:
    """Return what nodes cost by a file, as `place_graph` takes it: of each, `cost`, in seconds by device.

    `measured_on` of each are the devices on which the file has its cost; on the others, that is estimated from there.
    path: a trace of a session's runs; or JSON: what `WorkerSession.learn` returned, or `penstock graph place --json`
    printed, whose estimates are left out.
    By a trace, a node costs the median over its steps; what a region took is shared among its nodes as they are
    estimated; what waits, such as Dequeue, has no cost. On a device of which the file says nothing, a node costs as
    much more as is estimated.
    Raises: DataError if the file cannot be read; MismatchError if it is of another graph, or has no times of nodes.
    """
    try:
        with Path(path).open("rb") as file:
            is_json = file.read(64).lstrip()[:1] == b"{"
        if not is_json:
            return costs_of_trace(graph, read_trace(path), devices)
        return _costs_of_json(graph, json.loads(Path(path).read_text("utf-8")), devices)
    except OSError as error:
        raise DataError(f"costs: {error}") from error
    except MismatchError as error:
        raise MismatchError(f"{os.fspath(path)}: {error.text}") from None
    except ValueError as error:  # JSON that breaks off, or not UTF-8
        raise DataError(f"costs: {os.fspath(path)} is no JSON: {error}") from error


def _costs_of_json(graph: Graph, document: dict[str, Any], devices: Devices) -> dict[str, dict[str, Any]]:
    rows, entries = document.get("results"), list(document.items())
    if isinstance(rows, list):
        entries = [
            (str(row.get("node", "")), {_OF_ROW.get(field, field): row[field] for field in row})
            for row in rows
            if isinstance(row, dict) and row.get("cost_from") in ("measured", "given")
        ]
    if not entries:
        raise MismatchError("it has no cost that was measured")
    _check_all_known(name for name, _ in entries if name not in graph.nodes)
    measured, others = dict[tuple[str, str], float](), dict[str, dict[str, Any]]()
    for name, each in entries:
        cost = each.get("cost") if isinstance(each, dict) else None
        if not isinstance(cost, dict) or not all(map(is_amount, cost.values())):
            raise MismatchError(f"the cost of {name!r} is {cost!r:.80}; give seconds by device")
        others[name] = {field: each[field] for field in ("bytes", "hop") if field in each}
        for field, amount in others[name].items():
            if not is_amount(amount):
                raise MismatchError(f"{field} of {name!r} is {amount!r:.80}; give a number")
        own = list(cost) if each.get("measured_on") is None else each["measured_on"]
        if not isinstance(own, list) or not all(device in list(cost) for device in own):
            raise MismatchError(f"measured_on of {name!r} is {own!r:.80}; give a list of devices of its cost")
        measured |= {(device, name): cost[device] for device in own}
    costs = _on_all(_estimates(graph, devices), measured, devices)
    return {name: others[name] | cost for name, cost in costs.items()}


#: What a row of `penstock graph place --json` calls otherwise than `place_graph`.
_OF_ROW = {"cost_seconds": "cost"}


def costs_of_trace(graph: Graph, trace: Trace, devices: Devices) -> dict[str, dict[str, Any]]:
    """Return what nodes cost by a trace of a graph's runs; Raises: as `read_costs`."""
    estimate = _estimates(graph, devices)
    return _on_all(estimate, _measured(graph, trace, estimate), devices)


#: From a node and a device to the seconds that are estimated.
Estimate = Callable[[str, str], float]


def _estimates(graph: Graph, devices: Devices) -> Estimate:
    works = {name: work_of(node) for name, node in graph.nodes.items()}
    return lambda name, device: devices.kernel_seconds(device, works[name].flops, works[name].nbytes)


def _on_all(
    estimate: Estimate, measured: Mapping[tuple[str, str], float], devices: Devices
) -> dict[str, dict[str, Any]]:
    """Return the cost of nodes on all devices, by what they took on some.

    On another device a node costs as much more as is estimated, and as that device took longer for what it ran than was
    estimated of it.
    """
    ran = {device for device, _ in measured}

    def slowness(device: str) -> float:
        """Return how much longer a device takes than is estimated; as all do, where it ran nothing."""
        seen = [each for each in measured if each[0] == device or device not in ran]
        estimated = sum(estimate(name, one) for one, name in seen)
        return sum(measured[each] for each in seen) / estimated if estimated else 1.0

    slow = {device: slowness(device) for device in (*ran, *devices.names)}
    costs: dict[str, dict[str, Any]] = {}
    for (device, name), seconds in measured.items():
        own = estimate(name, device) * slow[device]
        each = costs.setdefault(name, {"cost": {}, "measured_on": []})
        each["measured_on"].append(device)
        cost = each["cost"]
        for other in dict.fromkeys((device, *devices.names)):
            if other == device or (other, name) not in measured:
                cost[other] = seconds * (estimate(name, other) * slow[other] / own if own else 1.0)
    return costs


def _measured(graph: Graph, trace: Trace, estimate: Estimate) -> dict[tuple[str, str], float]:
    """Return the seconds of a step by device and node."""
    nodes = trace.spans[(trace.spans["kind"] == Kind.NODE) & (trace.spans["flow"] == NO_FLOW)]
    if not nodes.size:
        raise MismatchError("it has no spans of nodes: record runs of a graph with Session(graph, trace=...)")
    keys, place = np.unique(nodes[["rank", "sample", "step"]], return_inverse=True)
    took = np.bincount(place, nodes["end"] - nodes["start"])
    members = {number: members_of(trace, number) for number in np.unique(nodes["sample"]).tolist()}
    ran = {name for each in members.values() for name in each}
    _check_all_known(name for name in ran if name and not _outermost(graph, name))

    @cache
    def shares_of(device: str, number: int) -> dict[str, float]:
        """Return which share of what a unit takes on a device is of each of its nodes that does not wait."""
        estimated = {
            name: estimate(name, device) if name else 0.0
            for name in (_outermost(graph, each) for each in members[number])
        }
        of_all = sum(estimated.values())
        return {
            name: seconds / of_all if of_all else 1 / len(estimated)
            for name, seconds in estimated.items()
            if name and operation(graph.nodes[name].op).kind != "waiting"
        }

    steps: dict[tuple[str, str], dict[int, float]] = {}
    for (rank, number, step), seconds in zip(keys.tolist(), took.tolist(), strict=True):
        device = f"{trace.tasks[rank]}/device:cpu:0" if rank in trace.tasks else _ONE_PROCESS
        for name, share in shares_of(device, number).items():
            by_step = steps.setdefault((device, name), {})
            by_step[step] = by_step.get(step, 0.0) + seconds * share
    return {key: statistics.median(each.values()) for key, each in steps.items()}


def _outermost(graph: Graph, name: str) -> str:
    """Return the node of the graph that a name is of: the loop of "loop/node"; "" if there is none."""
    while name and name not in graph.nodes:
        name = name.rpartition("/")[0]
    return name


def _check_all_known(unknown: Iterable[str]) -> None:
    """Raise MismatchError naming nodes that the graph has not, if there are any."""
    other = sorted(unknown)
    if other:
        names = format_names(map(repr, other))
        raise MismatchError(f"it is of another graph: it has {names}, and this one has not")
