"""Where the nodes of a session on workers run: by what they cost as far as it is known, and by trials of steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.graph.errors import GraphError, MismatchError
from penstock.graph.model.graph import Graph
from penstock.graph.run.partition import Part, holds_state, parts_of, task_of
from penstock.graph.run.statistics import Statistics
from penstock.graph.run.wanted import Wanted
from penstock.graph.tools.costs import read_costs
from penstock.graph.tools.placing import place_nodes, placed_nodes
from penstock.graph.workers.config import SessionConfig
from penstock.graph.workers.nodes import sent_nodes
from penstock.graph.workers.requests import Requests
from penstock.policy.graph_pace import Pace
from penstock.policy.graph_placement import (
    USUAL_BYTES_PER_SECOND,
    USUAL_LATENCY_SECONDS,
    Devices,
    PlacedNode,
    Placement,
)
from penstock.policy.graph_receives import receive_order
from penstock.policy.graph_search import rivals
from penstock.policy.graph_trial import PlacementTrial
from penstock.units import format_seconds

#: Of what is fed.
Shapes = tuple[tuple[int, ...], ...]
#: Latency and bytes a second, by pair of tasks or of devices.
Links = Mapping[tuple[str, str], tuple[float, float]]

#: Machines whose times for the same work differ by less are equally fast.
_NOISE = 1.5
#: Shapes of feeds for which a cut knows the pace, those used last.
_MOST_SHAPES = 64
#: What a tensor keeps a worker from its kernels at most, to send or to receive it: above that, messages are under way.
_MOST_HOP_SECONDS = 2e-4


@dataclass(slots=True)
class Cut:
    """What workers run for a step: parts by task, under a number; and the device of each node.

    trial, turn: that it is part of, and the placement's number in it; None, 0 where there is none. runs: that are under
    way. is_over: no more begin. paces: of its workers, by the shapes of feeds.
    """

    number: int
    parts: dict[str, Part]
    device: Mapping[str, str]
    trial: PlacementTrial | None
    turn: int
    runs: int = 0
    is_over: bool = False
    paces: dict[Shapes, Pace] = field(default_factory=dict)

    def pace_of(self, shapes: Shapes, slowness: Mapping[str, float]) -> Pace:
        """Return the pace for feeds of some shapes. slowness: of workers, should it be new."""
        pace = self.paces[shapes] = self.paces.pop(shapes) if shapes in self.paces else Pace(slowness)
        if len(self.paces) > _MOST_SHAPES:
            del self.paces[next(iter(self.paces))]
        return pace


class SessionPlacement:
    """Places the nodes of a session, and cuts its steps into parts by that. Any thread calls; the graph's lock holds.

    machine: devices of workers with what is known of them, the preferred ones first; None: nothing is. requests: to the
    workers. report: gets a line when the pace of a worker changes.
    """

    def __init__(
        self,
        graph: Graph,
        config: SessionConfig,
        machine: Devices | None,
        requests: Requests,
        report: Callable[[str], None] | None,
    ) -> None:
        self._graph, self._config, self._requests, self._report = graph, config, requests, report
        self._peers = requests.peers
        latency, rate = config.link_latency_seconds, config.link_bytes_per_second
        #: Whether `learn` has to find out what links take.
        self._measures_links = machine is None and latency is None and rate is None
        #: What a node costs that nobody measured: nothing anywhere, where no machine says what devices are.
        self._is_free = machine is None
        self._known = replace(
            Devices([], bytes_per_second=USUAL_BYTES_PER_SECOND if rate is None else rate)
            if machine is None
            else machine,
            latency_seconds=USUAL_LATENCY_SECONDS if latency is None else latency,
        )
        self._options = {"regions": config.regions, "check_finite": config.check_finite}
        self._costs: dict[str, dict[str, Any]] = {}
        self._parts = 0
        self._cuts: dict[tuple[Wanted, int], Cut] = {}
        #: Of what `learn` ran last, until its fastest placement is known.
        self._trials: dict[Wanted, PlacementTrial] = {}
        self._has_learned = False
        self._placement: Placement | None = None
        self._device: dict[str, str] = {}

    def check_devices(self) -> None:
        """Raise MismatchError for what the machine has and the workers have not."""
        found = [device for peer in self._peers.values() for device in peer.devices]
        if missing := [device for device in self._known.names if device not in found]:
            raise MismatchError(
                f"the machine has {', '.join(missing)}, and the workers have {', '.join(found)}: leave out of its file "
                "what is not there, or name the workers as it does"
            )

    def read_costs(self) -> None:
        """Take the costs of nodes that the session was given, once its workers are known. Raises: as `read_costs`."""
        costs = self._config.costs
        if isinstance(costs, str | os.PathLike):
            self._costs = read_costs(self._graph, costs, self._joined())
        else:
            self._costs = {name: dict(each) for name, each in (costs or {}).items()}

    # -- Placing ---------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[str]:
        """Return the devices of all workers, those of the machine first, which are preferred."""
        found = [device for peer in self._peers.values() for device in peer.devices]
        return [*self._known.names, *(device for device in found if device not in self._known.names)]

    def placement(self) -> Placement:
        """Return where each node of the graph runs, and why: see `WorkerSession.placement`."""
        with self._graph.lock:
            if self._placement is None or len(self._placement.device) < len(self._graph.nodes):
                self._placement = place_nodes(
                    self._graph,
                    self._nodes(),
                    self._joined(),
                    fixed=self._device,
                    objective=self._config.objective,
                )
                self._device.update(self._placement.device)
            return self._placement

    def device_of(self, name: str) -> str:
        """Return the device of a node that is placed, or of the loop that it is in; "" if there is none."""
        return device_of(name, self._device)

    def _joined(self) -> Devices:
        """Return the devices of all workers with what is known of them and of their links."""
        return replace(self._known, names=self.devices)

    def _nodes(self, *, of_any: bool = False) -> list[PlacedNode]:
        """Return what a placement knows of the nodes. of_any: they run where others brought what they name, too."""
        peers = [] if of_any else self._peers.values()
        brought = {device: peer.brought for peer in peers for device in peer.devices}
        default = dict.fromkeys(self.devices, 0.0) if self._is_free else None
        return placed_nodes(self._graph, self._joined(), default, self.costs(), brought)

    def costs(self) -> dict[str, dict[str, Any]]:
        """Return copies of the costs of nodes, on workers that are as slow as they are."""
        peers = [peer for peer in self._peers.values() if peer.slowness != 1]
        slow = {device: peer.slowness for peer in peers for device in peer.devices}
        found = {name: dict(known) for name, known in self._costs.items()}
        for known in found.values():
            if isinstance(cost := known.get("cost"), Mapping):
                known["cost"] = {d: each * slow[d] if d in slow else each for d, each in cost.items()}
        return found

    def _place_anew(self) -> dict[str, str]:
        """Place again what has no state, and return where the others stay.

        Raises: as `placement`, and all stays as it was.
        """
        before = self._device, self._placement
        stays = {name for name, node in self._graph.nodes.items() if holds_state(node)}
        fixed = {name: device for name, device in self._device.items() if name in stays}
        self._device, self._placement = dict(fixed), None
        try:
            self.placement()
        except BaseException:
            self._device, self._placement = before
            raise
        self._forget()
        return fixed

    # -- Steps -----------------------------------------------------------------------------------------------

    def begin(self, wanted: Wanted) -> Cut:
        """Return what each worker runs of a step, until `end`.

        A step of a trial runs under one of its placements. A trial whose graph has got new nodes since is over.
        """
        with self._graph.lock:
            trial = self._trials.get(wanted)
            if trial is not None and len(trial.placements[0].device) < len(self._graph.nodes):
                self._forget()
                trial = None
            turn = 0 if trial is None else trial.begin()
            cut = self._cuts.get((wanted, turn))
            if cut is None:
                placement = self.placement() if trial is None else trial.placements[turn]
                task = {name: task_of(each) for name, each in placement.device.items()}
                order = list(placement.finish_seconds)
                parts = parts_of(self._graph, task, wanted, self._receives(placement), order)
                self._parts += 1
                for where, part in parts.items():
                    self._requests.tell(
                        where,
                        {"kind": "part", "part": self._parts, **self._options, **sent_nodes(part.nodes)},
                    )
                cut = self._cuts[wanted, turn] = Cut(self._parts, parts, placement.device, trial, turn)
            cut.runs += 1
            return cut

    def end(self, wanted: Wanted, cut: Cut, seconds: float | None) -> None:
        """Count a run of a cut as ended; with the last step of a trial, nodes without a state go where it was fastest.

        seconds: None for a step that failed.
        """
        with self._graph.lock:
            cut.runs -= 1
            self._drop(cut)
            if cut.trial is None or not cut.parts or self._trials.get(wanted) is not cut.trial:
                return
            if (found := cut.trial.end(cut.turn, seconds)) is not None:
                del self._trials[wanted]
                self.drop_cuts()
                self._device |= found.device
                self._placement = found

    def _forget(self) -> None:
        """End all trials, and what workers run."""
        self._trials.clear()
        self.drop_cuts()

    def drop_cuts(self) -> None:
        """Let workers forget what they run, with its constants: at once, or when the last run of it ends."""
        with self._graph.lock:
            for cut in self._cuts.values():
                cut.is_over = True
                self._drop(cut)
            self._cuts.clear()

    def _drop(self, cut: Cut) -> None:
        if cut.is_over and not cut.runs and not self._requests.is_lost:
            for task in cut.parts:
                self._requests.tell(task, {"kind": "drop", "part": cut.number})

    def _receives(self, placement: Placement) -> dict[tuple[str, str], str]:
        """Return, by node and worker that needs it, the node there after which it is early enough to ask for it."""
        if not (self._costs and self._config.orders_receives):
            return {}
        order = receive_order(self._nodes(of_any=True), placement, self._joined())
        return {(each.source, task_of(each.device)): each.after for each in order if each.after}

    # -- Learning --------------------------------------------------------------------------------------------

    def learn(
        self, run: Callable[[Statistics], object], measure_links: Callable[[], Links]
    ) -> dict[str, dict[str, Any]]:
        """Place by what nodes take in a run: see `WorkerSession.learn`.

        run: of the session. measure_links: between each two workers.
        """
        statistics = Statistics(is_warm=True)
        before, self._options = self._options, {**self._options, "regions": False}
        try:
            with self._graph.lock:
                self._forget()
            run(statistics)
            learned = [wanted for wanted, _ in self._cuts]
        finally:
            self._options = before
            self.drop_cuts()
        slowness = {task: peer.slowness for task, peer in self._peers.items()}
        reference = {task: peer.reference_seconds * slowness[task] for task, peer in self._peers.items()}
        hop = 0.0
        if self._measures_links:
            links = self._between_devices(measure_links())
            self._known = replace(self._known, links=links)
            hop = min([_MOST_HOP_SECONDS, *(latency / 2 for latency, _ in links.values())])
        with self._graph.lock:
            for name, seconds in statistics.seconds.items():
                if name in self._graph.nodes:
                    each = seconds / statistics.kernels[name]
                    own = reference[task_of(statistics.devices[name])]
                    self._costs[name] = {
                        "cost": {
                            d: each * _speed(reference[task_of(d)] / own) / slowness[task_of(d)]
                            for d in self.devices
                        },
                        "bytes": statistics.nbytes.get(name, 0),
                        "hop": hop,
                    }
            fixed = self._place_anew()
            self._has_learned = True
            if self._config.objective == "search" and not self._config.is_lossy:
                best = self.placement()
                if others := rivals(best, self._nodes(), self._joined(), fixed=fixed):
                    self._trials = {each: PlacementTrial([best, *others]) for each in learned}
        return self.costs()

    def _between_devices(self, found: Links) -> Links:
        """Return the links between each two devices, by those between workers."""
        return {
            ends: link
            for pair, link in found.items()
            for one in self._peers[pair[0]].devices
            for other in self._peers[pair[1]].devices
            for ends in ((one, other), (other, one))
        }

    def notice_pace(
        self, cut: Cut, shapes: Shapes, answers: Mapping[str, Mapping[str, Any]], took: float
    ) -> None:
        """Count a step; report a worker whose pace has changed, and place by that what `learn` had placed.

        Where no other placement is possible, that which there is stays.
        """
        then = "learn() places nodes by that"
        with self._graph.lock:
            busy = {task: float(answer["busy_seconds"]) for task, answer in answers.items()}
            pace = cut.pace_of(shapes, {task: peer.slowness for task, peer in self._peers.items()})
            # Of several cuts, each finds it out.
            found = {
                task: change
                for task, change in pace.count(busy, took).items()
                if _speed(change.times / self._peers[task].slowness) != 1
            }
            for task, change in found.items():
                self._peers[task].slowness = change.times
            if found and self._has_learned and not self._config.is_lossy:
                try:
                    self._place_anew()
                    then = "nodes are placed anew by that"
                except GraphError as error:
                    then = f"nodes stay where they are, as no other placement is possible: {error}"
        if self._report is not None:
            for task, change in found.items():
                now, usual = (format_seconds(each) for each in (change.seconds, change.usual_seconds))
                self._report(
                    f"{task} has become {change.times:.1f} times slower: its part of a step takes {now} in place of "
                    f"{usual}; another program may run there, or its processor is throttled; {then}"
                    if change.times > 1
                    else f"{task} is as fast as before: its part of a step takes {now}; {then}"
                )


def device_of(name: str, placed: Mapping[str, str]) -> str:
    """Return the device of a node, or of the loop that it is in; "" if there is none."""
    while name and name not in placed:
        name = name.rpartition("/")[0]
    return placed.get(name, "")


def _speed(ratio: float) -> float:
    """Return how much longer a machine takes than another; what may be noise is none."""
    return ratio if not 1 / _NOISE < ratio < _NOISE else 1.0
