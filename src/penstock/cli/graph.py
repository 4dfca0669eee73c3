"""`penstock graph`: workers that run parts of a dataflow graph, and where its nodes go."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import parsed_amount
from penstock.cli.output import Table, add_command, add_output_options, print_line, show
from penstock.errors import ConfigError
from penstock.files import read_text
from penstock.units import format_count, format_seconds, parse_rate, parse_seconds

if TYPE_CHECKING:  # it imports PyTorch
    from penstock.graph.workers import Worker

_OF_WORKER = """\
Runs parts of dataflow graphs for programs that open a WorkerSession, until Ctrl-C. All processes of a cluster have one
secret in a file, which the first one makes. See docs/howto/graph-workers.md.
"""
_EXAMPLES_OF_WORKER = """\
examples:
  penstock graph worker --task /job:ps/task:0 --listen 10.0.0.7:7448
  penstock graph worker --task /job:worker/task:1 --listen node8 --module my_nodes
"""
_EXAMPLES_OF_PLACE = """\
examples:
  penstock graph place model.json --device /job:a/task:0/device:cpu:0 --device /job:b/task:0/device:cpu:0
  penstock graph place model.json --machine machine.toml --objective throughput
  penstock graph place model.json --machine machine.toml --costs run.trace
JSON: results[] of node, device, finish_seconds, reason, cost_seconds by device, cost_from (measured, given,
default: 0, without --machine and where a node only initialises, or estimated), measured_on (devices, the other costs
being estimated from there; null where it is not measured), bytes of the output; step_seconds, until the last node
finishes; devices[] of device, nodes, busy_seconds of a step.
"""


def add_graph(commands: Any) -> None:
    group: argparse.ArgumentParser = commands.add_parser(
        "graph", help="run parts of a dataflow graph here, or show where its nodes go"
    )
    kinds = group.add_subparsers(required=True, metavar="WHAT")
    worker = add_command(
        kinds, "worker", _worker, "run parts of graphs for other programs", _OF_WORKER, _EXAMPLES_OF_WORKER
    )
    worker.add_argument("--task", required=True, metavar="NAME", help="this worker's name: /job:ps/task:0")
    worker.add_argument(
        "--listen",
        metavar="ADDRESS",
        default="127.0.0.1",
        help='"host:port" of this machine, by which the others reach it (%(default)s; port 7448)',
    )
    worker.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="secret of the cluster; made if it is not there "
        "(default: $PENSTOCK_GRAPH_KEY, or ~/.config/penstock/graph.key)",
    )
    worker.add_argument(
        "--module",
        metavar="MODULE",
        help="a Python module with dicts `functions` and `batches`, for Call and NextBatch nodes",
    )
    worker.add_argument(
        "--slowness",
        type=float,
        default=1.0,
        metavar="X",
        help="make kernels take X times as long, to try a placement (%(default)s)",
    )
    place = add_command(
        kinds, "place", _place, "show where the nodes of a graph go, and why", epilog=_EXAMPLES_OF_PLACE
    )
    place.add_argument(
        "graph", type=Path, metavar="GRAPH", help="JSON text of a graph, as Graph.to_json writes it"
    )
    place.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="a machine's TOML with devices, their memory, links and network",
    )
    place.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="trace of the graph's runs, or JSON of WorkerSession.learn or of this command: what nodes take",
    )
    place.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="one for each device, those first that are preferred, in place of the machine's",
    )
    place.add_argument(
        "--objective",
        default="search",
        help="latency of one step, node by node; search, the same and improved; or throughput of steps that follow "
        "each other (%(default)s, as of a WorkerSession)",
    )
    place.add_argument(
        "--latency",
        metavar="TIME",
        help="latency of a message between two devices that no link is named for (50 us)",
    )
    place.add_argument(
        "--bandwidth", metavar="RATE", help="between these devices (the machine's network, or 1 GB/s)"
    )
    add_output_options(place, plot=False)


def _worker(options: argparse.Namespace) -> None:
    if options.slowness < 1:
        raise ConfigError(f"--slowness is {options.slowness}; 1 is as fast as can be")
    from penstock.graph.workers.access import check_task
    from penstock.heap import keep_freed_memory

    check_task(options.task, "--task ")
    keep_freed_memory()
    with listening_worker(
        options.task, options.listen, options.key, options.module, options.slowness
    ) as worker:
        worker.wait()


@contextlib.contextmanager
def listening_worker(
    task: str,
    listen: str,
    key: Path | None,
    module: str | None,
    slowness: float = 1.0,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Iterator[Worker]:
    """Give a worker that listens, and print where; it is closed in the end.

    key: file of the cluster's secret, made if it is not there. module: has its functions and batches. functions: which
    it has, too.
    """
    from penstock.graph.workers import KEY, Worker
    from penstock.graph.workers.access import address_of
    from penstock.graph.workers.worker import brought_by
    from penstock.ranks.access import numeric
    from penstock.report import print_report

    path = KEY.path(key)
    if KEY.make(path):
        print_line(f"made the secret {path}: all processes of the cluster need this file")
    host, port = address_of(listen)
    own, batches = brought_by(module)
    worker = Worker(
        task,
        KEY.read(path),
        interface=numeric(host),
        port=port,
        functions={**(functions or {}), **own},
        batches=batches,
        slowness=slowness,
        report=print_report,
    )
    print_line(f"{task} listens at {worker.address} (process {os.getpid()})")
    sys.stdout.flush()
    with contextlib.closing(worker):
        yield worker


def _place(options: argparse.Namespace) -> None:
    from penstock.graph import Devices, Graph
    from penstock.graph.tools.costs import read_costs
    from penstock.graph.tools.placing import place_nodes, placed_nodes, read_devices
    from penstock.graph.workers.access import is_device
    from penstock.policy.graph_placement import USUAL_BYTES_PER_SECOND, USUAL_LATENCY_SECONDS

    graph = Graph.from_json(read_text(options.graph))
    machine = read_devices(options.machine)
    devices = machine or Devices([], bytes_per_second=USUAL_BYTES_PER_SECOND)
    said = (node.placement.get("cost") for node in graph.nodes.values())
    known = {*devices.names, *(name for cost in said if isinstance(cost, Mapping) for name in cost)}
    for name in options.device or ():
        if name not in known and not is_device(name):
            raise ConfigError(
                f"--device {name!r:.80} is no name of a device: give one such as gpu:0, or "
                "/job:worker/task:0/device:cpu:0"
            )
    latency = USUAL_LATENCY_SECONDS
    if options.latency is not None:
        latency = parsed_amount("--latency", parse_seconds, options.latency)
    devices = replace(devices, names=options.device or devices.names, latency_seconds=latency)
    if options.bandwidth is not None:
        rate = parsed_amount("--bandwidth", parse_rate, options.bandwidth)
        devices = replace(devices, bytes_per_second=rate)
    if not devices.names:
        raise ConfigError(
            "no devices are named: give --device for each, or --machine with a file that has [[device]]"
        )
    # As of a session.
    default = dict.fromkeys(devices.names, 0.0) if machine is None else None
    costs = None if options.costs is None else read_costs(graph, options.costs, devices)
    about = placed_nodes(graph, devices, default, costs)
    placed = place_nodes(graph, about, devices, objective=options.objective)
    rows = [
        (name, placed.device[name], placed.finish_seconds[name], placed.reason[name]) for name in graph.nodes
    ]
    table = Table(
        f"{format_count(len(rows), 'node')} of {options.graph}",
        ("node", "device", "finish", "reason"),
        [(node, device, format_seconds(finish), reason) for node, device, finish, reason in rows],
    )
    fields = ("node", "device", "finish_seconds", "reason")
    results = [
        {
            **dict(zip(fields, row, strict=True)),
            "cost_seconds": node.cost_seconds,
            "cost_from": node.basis.removeprefix("cost ").partition(":")[0],
            "measured_on": (costs or {}).get(node.name, {}).get("measured_on"),
            "bytes": node.nbytes,
        }
        for row, node in zip(rows, about, strict=True)
    ]
    on = {device: [node for node in about if placed.device[node.name] == device] for device in devices.names}
    loads: list[dict[str, Any]] = [
        {
            "device": device,
            "nodes": len(nodes),
            "busy_seconds": sum(node.cost_seconds[device] for node in nodes),
        }
        for device, nodes in on.items()
    ]
    shares = (
        f"{each['device']} has {format_count(each['nodes'], 'node')} and is busy for "
        f"{format_seconds(each['busy_seconds'])}"
        for each in loads
    )
    summary = f"A step ends at {format_seconds(placed.end_seconds)}: {'; '.join(shares)}."
    show(
        options,
        {"results": results, "step_seconds": placed.end_seconds, "devices": loads},
        [table],
        [summary],
    )
