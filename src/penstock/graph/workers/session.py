"""A session whose nodes run on workers: the client places them, cuts each run into parts, and asks once per worker."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from penstock.errors import PenstockError, WaitTimeout
from penstock.graph import errors
from penstock.graph.errors import (
    CancelledError,
    CorruptError,
    GraphError,
    KernelError,
    MismatchError,
    WorkerLostError,
)
from penstock.graph.model.dtypes import to_client
from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Endpoint
from penstock.graph.run.partition import Part, holds_state, parts_of, task_of
from penstock.graph.run.reach import inner_nodes
from penstock.graph.run.session import arranged, asked, fed_values
from penstock.graph.run.statistics import Statistics
from penstock.graph.state.resources import check_state
from penstock.graph.state.saves import Saves, saving
from penstock.graph.state.tensors import read_state, write_state
from penstock.graph.tools.costs import read_costs
from penstock.graph.tools.placing import other_placements, place_graph, placed_nodes, read_devices
from penstock.graph.workers.access import check_versions, checked_workers
from penstock.graph.workers.config import SessionArguments, SessionConfig, session_config
from penstock.graph.workers.lanes import StepWriter
from penstock.graph.workers.link import Link, key_of, offers_of
from penstock.graph.workers.link_probe import LinkProbe
from penstock.graph.workers.nodes import sent_nodes
from penstock.graph.workers.reaching import At, look_at_all, look_for, resolved
from penstock.graph.workers.wire import MOST_PART_BYTES, packed
from penstock.policy.graph_pace import Pace
from penstock.policy.graph_placement import (
    USUAL_BYTES_PER_SECOND,
    USUAL_LATENCY_SECONDS,
    Devices,
    Placement,
)
from penstock.policy.graph_receives import receive_order
from penstock.policy.graph_silence import Silence
from penstock.policy.graph_trial import PlacementTrial
from penstock.ranks.carrier_zmq import ZmqCarrier
from penstock.report import print_report
from penstock.units import format_seconds

#: How long workers may take to answer at all when a session begins; and after how long, and how long before the end of
#: that, the session looks why they do not.
HELLO_SECONDS, _LOOK_AFTER_SECONDS = 20.0, 1.0
#: Time between two messages that keep a session: workers end one whose client says nothing for a minute.
_PING_SECONDS = 5.0
#: Of every loss.
_GOES_ON = (
    "; the next run begins with the last saved state, or anew: go on from saves.step of an open saving()"
)
#: Machines whose times for the same work differ by less are equally fast.
_NOISE = 1.5


class WorkerSession:
    """Runs a graph on workers.

        with WorkerSession(graph, {"/job:ps/task:0": "tcp://a:4242", ...}, secret) as session:
            cost = session.run(c, {x: batch})

    It is used as a `Session`, and gives the same bits. A node goes where its `device` says, such as "/job:ps/task:0";
    what is free goes where it finishes first.
    """

    def __init__(
        self,
        graph: Graph | None,
        workers: Mapping[str, str],
        secret: bytes,
        config: SessionConfig | None = None,
        *,
        trace: str | os.PathLike[str] | None = None,
        report: Callable[[str], None] | None = print_report,
        **arguments: Unpack[SessionArguments],
    ) -> None:
        """Open a session on workers that listen already.

        graph: None: an empty one, for `extend`. workers: addresses by task. secret: of the cluster, 32 bytes.
        config, arguments: a `SessionConfig`, or the arguments of one.
        trace: a file for the timeline of all workers, as of `Session`.
        Raises: WorkerLostError naming the workers that do not answer, and why; VersionError; MismatchError for those of
            another secret or name, and for what the machine has and they have not; ConfigError for arguments next to
            a config, and for what is no name, address or secret of workers.
        """
        self._addresses, self._secret = checked_workers(workers, secret), secret
        self._config = config = session_config(config, arguments)
        self.graph = Graph() if graph is None else graph
        self.tasks = list(workers)
        self._costs: dict[str, dict[str, Any]] = {}
        machine = read_devices(config.machine)
        usual = (config.link_latency_seconds, config.link_bytes_per_second)
        #: Whether `learn` has to find out what links take.
        self._measures_links = machine is None and usual == (None, None)
        rate = USUAL_BYTES_PER_SECOND if usual[1] is None else usual[1]
        #: Those of the machine, which are preferred, and what joins all.
        self._known = replace(
            Devices([], bytes_per_second=rate) if machine is None else machine,
            latency_seconds=USUAL_LATENCY_SECONDS if usual[0] is None else usual[0],
        )
        self._options = {"regions": config.regions, "check_finite": config.check_finite}
        self._lock = threading.Lock()
        self._peers = {task: _Peer() for task in self.tasks}
        self._silence = Silence(self.tasks, config.lag_seconds)
        self._name = ""
        #: Whether all workers have answered that they opened the session of this name.
        self._is_opened = False
        self._asks: dict[int, _Ask] = {}
        self._next = self._parts = 0
        self._cuts: dict[tuple[_Key, int], _Cut] = {}
        #: Of what `learn` ran last, until its fastest placement is known.
        self._trials: dict[_Key, PlacementTrial] = {}
        self._has_learned = False
        self._placement: Placement | None = None
        self._device: dict[str, str] = {}
        self._lost: WorkerLostError | None = None
        #: Whether it was raised to the caller.
        self._is_raised = False
        self._folder: str | None = None
        #: Of a `saving` that is open: what it saved is gone back to before that of `_folder`.
        self._saves: Saves | None = None
        self._is_closed = False
        self._report = report
        self._trace = None if trace is None else StepWriter(trace, self.tasks)
        carrier = ZmqCarrier(None, MOST_PART_BYTES, keys=key_of(secret, ""))
        self._link = Link(
            carrier,
            self._take,
            on_tick=self._ping,
            tick_seconds=min(
                [_PING_SECONDS, *(each / 4 for each in (config.lag_seconds, config.node_seconds) if each)]
            ),
            on_cut=self._notice,
            on_wrong=self._refuse,
            report=report,
        )
        self._link.start()
        try:
            self._begin()
            self._costs = self._given_costs(config.costs)
        except BaseException:
            self._link.close()
            if self._trace is not None:
                self._trace.close()
            raise

    # -- Running ---------------------------------------------------------------------------------------------

    def extend(self, nodes: Any) -> None:
        """Add nodes to the graph, as `Graph.extend` does."""
        self._check_open()
        self.graph.extend(nodes)

    def run(
        self,
        fetches: Any = (),
        feeds: Mapping[Any, Any] | None = None,
        targets: Sequence[Any] = (),
        *,
        statistics: Statistics | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Run what the fetches and targets need, on all workers that it needs, and return the fetched values.

        As `Session.run`. Raises besides: InfeasibleError where constraints contradict each other; UnsupportedError for
        control flow that would have to run on several devices; WorkerLostError when a worker ends, stops or lags, which
        names it and nodes that it had to run. The next run begins with the state of the last save, or anew where there
        is none.
        A run that ends by an error, a time-out or Ctrl-C returns once all workers have ended it, so that the next one
        finds their state at rest; it waits lost_seconds for that at most, as a kernel is not interrupted.
        """
        self._check_open()
        wanted, arrange = arranged(fetches)
        places, operations = asked(self.graph, wanted, targets)
        endpoints = list(dict.fromkeys(endpoint for endpoint in places if endpoint is not None))
        fed, values = fed_values(self.graph, {} if feeds is None else feeds)
        self._recover()
        key = tuple(endpoints), tuple(operations), tuple(fed)
        trial = self._trial(key)
        turn = 0 if trial is None else trial.begin()
        found: dict[Endpoint, Any] = {
            endpoint: to_client(value)
            for endpoint, value in zip(fed, values, strict=True)
            if endpoint in endpoints
        }
        cut = self._cut(key, turn, trial)
        begin, took = time.perf_counter(), None
        try:
            answers = self._step(cut, fed, values, statistics, timeout_seconds) if cut.parts else {}
            took = time.perf_counter() - begin
        finally:
            self._leave(cut)
            if trial is not None and cut.parts:
                self._try(key, trial, turn, took)
        if took is not None and statistics is None:
            shapes = tuple(tuple(value.shape) for value in values)
            self._notice_pace(cut, shapes, answers, took)
        for task, answer in answers.items():
            results = zip(cut.parts[task].fetches, answer["values"], strict=True)
            found.update({endpoints[place]: value for place, value in results})
            if statistics is not None:
                self._count(statistics, task, answer["statistics"], cut.device)
        return arrange([None if each is None else to_client(found[each]) for each in places])

    def _step(
        self,
        cut: _Cut,
        fed: list[Endpoint],
        values: list[Any],
        statistics: Statistics | None,
        timeout_seconds: float | None,
    ) -> dict[str, dict[str, Any]]:
        messages = {
            task: {
                "kind": "run",
                "part": cut.number,
                "fetches": [str(endpoint) for endpoint in part.fetches.values()],
                "feeds": {str(fed[place]): values[place] for place in part.feeds},
                "targets": part.targets,
                "counts": statistics is not None,
                "is_warm": statistics is not None and statistics.is_warm,
                "records": self._trace is not None,
            }
            for task, part in cut.parts.items()
        }
        ask = self._ask(messages, holds={task: list(part.holds) for task, part in cut.parts.items()})
        traced = None if self._trace is None else self._trace.begin()
        try:
            return ask.wait(timeout_seconds)
        except BaseException as error:
            self._abort(ask, str(error) or type(error).__name__)
            raise
        finally:
            if self._trace is not None and traced is not None:
                offset = {task: peer.clock_offset_seconds for task, peer in self._peers.items()}
                answered = dict(ask.recorded)  # of a worker that is late, more may come
                recorded = {task: each for task, each in answered.items() if each is not None}
                missing = len(cut.parts) - len(answered)
                self._trace.end(
                    *traced, recorded, missing, offset, lambda name: task_of(cut.device.get(name, ""))
                )

    def _count(
        self, statistics: Statistics, task: str, counted: Mapping[str, Any], placed: Mapping[str, str]
    ) -> None:
        """Add what a worker counted of its own nodes; Sends and Recvs are none."""
        statistics.received_bytes[task] = counted["received_bytes"]
        statistics.add_live(task, counted["live_bytes"])
        for name, count in counted["kernels"].items():
            device = _device_of(name, placed)
            if task_of(device) == task:
                statistics.kernels[name] = statistics.kernels.get(name, 0) + count
                statistics.seconds[name] = statistics.seconds.get(name, 0.0) + counted["seconds"][name]
                statistics.devices[name] = device
                if name in counted["nbytes"]:
                    statistics.nbytes[name] = counted["nbytes"][name]

    # -- Placement -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[str]:
        """Return the devices of all workers, those of the machine first, which are preferred."""
        found = [device for peer in self._peers.values() for device in peer.devices]
        return [*self._known.names, *(device for device in found if device not in self._known.names)]

    @property
    def processes(self) -> dict[str, int]:
        """Return the process id of each task."""
        return {task: peer.pid for task, peer in self._peers.items()}

    def placement(self) -> Placement:
        """Return where each node of the graph runs, and why.

        A node stays where it was placed first. While runs after `learn` try placements in turn, it is the one that all
        other runs have; `Statistics.devices` of a run says where its nodes ran. Raises: InfeasibleError,
        UnsupportedError.
        """
        with self.graph.lock:
            if self._placement is None or len(self._placement.device) < len(self.graph.nodes):
                self._placement = place_graph(
                    self.graph, self._joined(), **self._to_place(), objective=self._config.objective
                )
                self._device.update(self._placement.device)
            return self._placement

    def _joined(self) -> Devices:
        """Return the devices of all workers with what is known of them and of their links."""
        return replace(self._known, names=self.devices)

    def _to_place(self) -> dict[str, Any]:
        """Return what a placement goes by beside devices, as arguments of `place_graph`."""
        brought = {device: peer.brought for peer in self._peers.values() for device in peer.devices}
        return {
            "default_cost_seconds": self._default_costs(),
            "fixed": dict(self._device),
            "costs": self._costs_now(),
            "brought": brought,
        }

    def _costs_now(self) -> dict[str, dict[str, Any]]:
        """Return copies of the costs of nodes, on workers that are as slow as they are."""
        peers = [peer for peer in self._peers.values() if peer.slowness != 1]
        slow = {device: peer.slowness for peer in peers for device in peer.devices}
        found = {name: dict(known) for name, known in self._costs.items()}
        for known in found.values():
            if isinstance(cost := known.get("cost"), Mapping):
                known["cost"] = {d: each * slow[d] if d in slow else each for d, each in cost.items()}
        return found

    def _given_costs(self, costs: Any) -> dict[str, dict[str, Any]]:
        if isinstance(costs, str | os.PathLike):
            return read_costs(self.graph, costs, self._joined())
        return {name: dict(each) for name, each in (costs or {}).items()}

    def _default_costs(self) -> dict[str, float] | None:
        """Return what a node costs that nobody measured: where no machine says what devices are, nothing anywhere."""
        return dict.fromkeys(self.devices, 0.0) if self._config.machine is None else None

    def learn(
        self, fetches: Any = (), feeds: Mapping[Any, Any] | None = None, targets: Sequence[Any] = ()
    ) -> dict[str, dict[str, Any]]:
        """Run something node by node, measure it, and place what has no state by that from now on.

        A node without a state runs three times there, and the faster of the last two counts: the first may load what
        it needs, and other programs may run beside.
        Links between workers are measured, too, where neither arguments nor a machine say what they take: by tensors of
        1 MiB at most, to and fro between each two.
        With `objective="search"` and without `is_lossy`, the next runs of the same take turns between that placement
        and up to three others, with as much as can be on one worker, and the fastest stays: eight runs each, and
        more, 50 at most, where all together take less than a second. No simulation knows what workers that compute at
        once keep from each other. Results are the same bits under each. One under which a run fails is not tried again.

        Returns: by node, `cost` (seconds by device), `bytes` (of its output) and `hop` (seconds that sending it keeps
        both workers from kernels), as `costs=` takes them. A kernel's time on other workers follows from how long they
        take for one product of matrices.
        Raises: as `run`; InfeasibleError where constraints leave no placement by that: nodes stay where they are.
        """
        statistics = Statistics(is_warm=True)
        before, self._options = self._options, {**self._options, "regions": False}
        try:
            self._drop_cuts()
            self._trials.clear()
            self.run(fetches, feeds, targets, statistics=statistics)
            learned = [key for key, _ in self._cuts]
        finally:
            self._options = before
            self._drop_cuts()
        slowness = {task: peer.slowness for task, peer in self._peers.items()}
        reference = {task: peer.reference_seconds * slowness[task] for task, peer in self._peers.items()}
        hop = 0.0
        if self._measures_links:
            links = self._measured_links()
            self._known = replace(self._known, links=links)
            hop = min([_MOST_HOP_SECONDS, *(latency / 2 for latency, _ in links.values())])
        with self.graph.lock:
            for name, seconds in statistics.seconds.items():
                if name in self.graph.nodes:
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
            known = self._place_anew()
            self._has_learned = True
            if self._config.objective == "search" and not self._config.is_lossy:
                best = self.placement()
                others = other_placements(self.graph, self._joined(), best, **known)
                if others:
                    self._trials = {key: PlacementTrial([best, *others]) for key in learned}
        return self._costs_now()

    def _trial(self, key: _Key) -> PlacementTrial | None:
        """Return the trial that a step is part of; one whose graph has got new nodes since is over."""
        trial = self._trials.get(key)
        if trial is not None and len(trial.placements[0].device) < len(self.graph.nodes):
            with self.graph.lock:
                self._trials.clear()
                self._drop_cuts()
            return None
        return trial

    def _try(self, key: _Key, trial: PlacementTrial, turn: int, seconds: float | None) -> None:
        """Count a step of a trial; with the last one, all that has no state goes where steps were fastest.

        seconds: None for a step that failed.
        """
        with self.graph.lock:
            if self._trials.get(key) is trial and (found := trial.end(turn, seconds)) is not None:
                del self._trials[key]
                self._drop_cuts()
                self._device |= found.device
                self._placement = found

    def _notice_pace(
        self, cut: _Cut, shapes: _Shapes, answers: Mapping[str, Mapping[str, Any]], took: float
    ) -> None:
        """Count a step; report a worker whose pace has changed, and place by that what `learn` had placed.

        Where no other placement is possible, that which there is stays.
        """
        then = "learn() places nodes by that"
        with self.graph.lock:
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

    def _place_anew(self) -> dict[str, Any]:
        """Place again what has no state, and return by what, as `_to_place`.

        Raises: as `placement`, and all stays as it was.
        """
        before = self._device, self._placement
        stays = {name for name, node in self.graph.nodes.items() if holds_state(node)}
        self._device = {name: device for name, device in self._device.items() if name in stays}
        self._placement = None
        known = self._to_place()
        try:
            self.placement()
        except BaseException:
            self._device, self._placement = before
            raise
        self._trials.clear()
        self._drop_cuts()
        return known

    def _measured_links(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return the latency and the bytes a second between each two devices of different workers."""
        probe = LinkProbe(self.tasks)
        config = replace(self._config, costs=None, regions=False, check_finite=False)
        with WorkerSession(probe.graph, self._addresses, self._secret, config, report=None) as session:
            found = probe.measure(session.run)
        return {
            ends: link
            for pair, link in found.items()
            for one in self._peers[pair[0]].devices
            for other in self._peers[pair[1]].devices
            for ends in ((one, other), (other, one))
        }

    def _cut(self, key: _Key, turn: int, trial: PlacementTrial | None) -> _Cut:
        """Return what each worker runs of a step, until `_leave`. turn: of the trial; 0 where there is none."""
        with self.graph.lock:
            cut = self._cuts.get((key, turn))
            if cut is None:
                placement = self.placement() if trial is None else trial.placements[turn]
                task = {name: task_of(each) for name, each in placement.device.items()}
                order = list(placement.finish_seconds)
                parts = parts_of(self.graph, task, *key, self._receives(placement), order)
                self._parts += 1
                for where, part in parts.items():
                    self._tell(
                        where,
                        {"kind": "part", "part": self._parts, **self._options, **sent_nodes(part.nodes)},
                    )
                cut = _Cut(self._parts, parts, placement.device)
                if trial is self._trials.get(key):
                    self._cuts[key, turn] = cut
                else:  # another thread's step ended it, or began one
                    cut.is_over = True
            cut.runs += 1
            return cut

    def _leave(self, cut: _Cut) -> None:
        """Count a run of a cut as ended."""
        with self.graph.lock:
            cut.runs -= 1
            self._drop(cut)

    def _drop_cuts(self) -> None:
        """Let workers forget what they run, with its constants: at once, or when the last run of it ends."""
        with self.graph.lock:
            for cut in self._cuts.values():
                cut.is_over = True
                self._drop(cut)
            self._cuts.clear()

    def _drop(self, cut: _Cut) -> None:
        if cut.is_over and not cut.runs and self._lost is None:
            for task in cut.parts:
                self._tell(task, {"kind": "drop", "part": cut.number})

    def _receives(self, placement: Placement) -> dict[tuple[str, str], str]:
        """Return, by node and worker that needs it, the node there after which it is early enough to ask for it."""
        if not (self._costs and self._config.orders_receives):
            return {}
        nodes = placed_nodes(self.graph, self._joined(), self._default_costs(), self._costs_now())
        order = receive_order(nodes, placement, self._joined())
        return {(each.source, task_of(each.device)): each.after for each in order if each.after}

    # -- State -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Save the state of all workers as one snapshot, as `Session.save` does; call it while no run is under way."""
        self._check_open()
        write_state(folder, self.state())
        self._folder = folder

    def restore(self, folder: str) -> None:
        """Continue from what `save` of this or of a `Session` wrote; call it while no run is under way.

        Raises: WorkerLostError if a worker was lost since the last run.
        """
        self._check_open()
        self.load(read_state(folder))
        self._folder = folder

    def saving(self, folder: str, schedule: Any, *, keep: int = 1) -> AbstractContextManager[Saves]:
        """Continue from the newest state of a folder, and save there when the schedule says: see `Session.saving`.

        After a WorkerLostError inside of it, go on with `step` of what it gave: the next run begins with that state, or
        anew where it is 0.
        """
        self._check_open()
        self._recover(is_asked=True)
        return self._saving(folder, schedule, keep)

    @contextmanager
    def _saving(self, folder: str, schedule: Any, keep: int) -> Iterator[Saves]:
        with saving(self, folder, schedule, keep) as saves:
            self._saves = saves
            try:
                yield saves
            finally:
                self._saves = None
                self._folder = folder if saves.has_any else self._folder

    def state(self) -> dict[str, Any]:
        """Return the state of all workers: variables, queues, positions of readers, counts of draws.

        Raises: WorkerLostError if a worker was lost since the last run.
        """
        answers = self._ask({task: {"kind": "state"} for task in self.tasks}, holds={}).wait(None)
        resources, runs = [], []
        for answer in answers.values():
            resources += answer["state"]["resources"]
            runs += answer["state"]["runs"]
        return {"graph_state": 1, "resources": resources, "runs": runs}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises: CorruptError if this is no such state; WorkerLostError if a worker was lost since the last run.
        """
        check_state(state)
        shares = self._shares(state)
        self._ask({task: {"kind": "load", "state": shares[task]} for task in shares}, holds={}).wait(None)

    def _shares(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the state of each worker: what nodes that are placed on it hold."""
        shares: dict[str, dict[str, Any]] = {
            task: {"graph_state": 1, "resources": [], "runs": []} for task in self.tasks
        }
        task = {name: task_of(each) for name, each in self.placement().device.items()}
        home: dict[tuple[str, str], str] = {}
        for node in self.graph.nodes.values():
            for each in inner_nodes(node):
                name = each.attr.get("shared_name") or each.attr.get("batches") or each.name
                home.setdefault((each.attr.get("container") or "", name), task[node.name])
        for each in state["resources"]:
            where = home.get((each["container"], each["name"]), self.tasks[0])
            shares[where]["resources"].append(each)
        for name, count in state["runs"]:
            shares[task_of(_device_of(name, self._device)) or self.tasks[0]]["runs"].append([name, count])
        return shares

    # -- Workers ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Greet all workers, and open a session on each.

        Raises: WorkerLostError, also for a worker that was lost since it answered.
        """
        before, self._name, self._is_opened = self._name, "", False
        if before:  # on those that live
            for task in self.tasks:
                self._tell(task, {"kind": "close", "session": before})
        offers = dict(enumerate(offers_of(self._secret, self._addresses).values()))
        self._link.connect(offers, cut_seconds=self._config.lost_seconds)
        began = time.perf_counter()
        answers = self._greet()
        for task, answer in answers.items():
            if answer.get("task") != task:
                raise MismatchError(
                    f"the worker at {self._addresses[task]} is {answer.get('task')!r:.80}, and {task!r} was asked for"
                )
            check_versions(task, answer.get("versions", {}))
            peer = self._peers[task]
            peer.reached_at = resolved(self._addresses[task])
            if peer.pid != answer["pid"]:  # it measured its reference anew
                peer.slowness = 1.0
            peer.pid, peer.devices = int(answer["pid"]), list(answer["devices"])
            peer.brought = {
                *(("Call", name) for name in answer["functions"]),
                *(("NextBatch", name) for name in answer["batches"]),
            }
            peer.reference_seconds = float(answer["reference_seconds"])
            # Of one host, all have one clock; of others, it is known as far as the greeting took.
            now, clock = time.perf_counter(), float(answer["clock"])
            peer.clock_offset_seconds = 0.0 if began <= clock <= now else (began + now) / 2 - clock
            # It answered up to HELLO_SECONDS ago, and was not asked since.
            self._silence.hear(task, time.monotonic())
            peer.is_here = True
        found = [device for peer in self._peers.values() for device in peer.devices]
        if missing := [device for device in self._known.names if device not in found]:
            raise MismatchError(
                f"the machine has {', '.join(missing)}, and the workers have {', '.join(found)}: leave out of its file "
                "what is not there, or name the workers as it does"
            )
        self._name = uuid.uuid4().hex
        self._cuts.clear()
        opening = {
            "kind": "open",
            "addresses": self._addresses,
            "seed": self._config.seed,
            "lost_seconds": self._config.lost_seconds,
            "shares_memory": self._config.shares_memory,
            "is_lossy": self._config.is_lossy,
        }
        self._ask(dict.fromkeys(self.tasks, opening)).wait(HELLO_SECONDS)
        self._is_opened = True
        with self._lock:
            if self._lost is not None and not all(peer.is_here for peer in self._peers.values()):
                self._is_raised = True
                raise self._lost
            self._lost = None

    def _greet(self) -> dict[str, dict[str, Any]]:
        """Return what each worker answers to a greeting; they may start while it waits.

        Raises: WorkerLostError; MismatchError for a worker of another secret or name, as soon as that is seen.
        """
        begun = time.monotonic()
        greeted = self._ask({task: {"kind": "hello"} for task in self.tasks})
        end, early = begun + HELLO_SECONDS, min(_LOOK_AFTER_SECONDS, HELLO_SECONDS / 2)
        try:
            for is_first, until in ((True, begun + early), (False, end - early)):
                try:
                    return greeted.wait(until - time.monotonic())
                except WaitTimeout:
                    look = look_for(greeted.pending(), self._addresses, self._secret, until + early)
                    if look.is_final:
                        raise MismatchError(look.why) from None
                    if is_first and self._report is not None:
                        self._report(
                            f"the session waits up to {HELLO_SECONDS:.0f} s for its workers: {look.why}"
                        )
            return greeted.wait(end - time.monotonic())
        except WaitTimeout:
            raise WorkerLostError(
                f"no answer in {HELLO_SECONDS:.0f} s: {look.why}; start each worker, and give, for each name, the "
                "address that its own worker prints"
            ) from None
        finally:
            self.forget(greeted.number)

    def _recover(self, *, is_asked: bool = False) -> None:
        """Begin anew if a worker was lost, with the state of the last save; where that fails, the next run tries again.

        is_asked: whether to go back to a save is what the caller asks for.
        Raises: WorkerLostError if that is not asked for and the loss was not raised yet: nobody goes back unknowingly.
        """
        with self._lock:
            if (lost := self._lost) is None:
                return
            if not (is_asked or self._is_raised):
                self._is_raised = True
                raise lost
        try:
            self._begin()
            if not (self._saves is not None and self._saves.go_back()) and self._folder is not None:
                self.load(read_state(self._folder))
        except BaseException:
            with self._lock:
                self._lost = self._lost or lost
            raise

    def _tell(self, task: str, message: Mapping[str, Any]) -> None:
        self._send(task, packed({"session": self._name, **message}))

    def _send(self, task: str, parts: list[Any]) -> None:
        nbytes = self._link.ask(self.tasks.index(task), parts)
        self._silence.send(task, nbytes, time.monotonic())

    def _ask(
        self, messages: Mapping[str, Mapping[str, Any]], holds: Mapping[str, list[str]] | None = None
    ) -> _Ask:
        """Send each worker a request, or none if one cannot be sent; what returns collects the answers.

        holds: nodes that each has to run for it; None: for a request of a session that begins.
        Raises: WorkerLostError if one is lost, unless `holds` is None.
        """
        with self._lock:
            if self._lost is not None and holds is not None:
                self._is_raised = True
                raise self._lost
            self._next += 1
            number = self._next
            ask = self._asks[number] = _Ask(self, number, list(messages), dict(holds or {}))
            oldest = min(self._asks)
        about = {"session": self._name, "ask": number, "step": number, "oldest": oldest}
        try:
            made = {task: packed({**message, **about}) for task, message in messages.items()}
        except BaseException:
            self.forget(number)
            raise
        for task, parts in made.items():
            self._send(task, parts)
        return ask

    def _abort(self, ask: _Ask, why: str) -> None:
        """End what is still under way of a step, and wait until the workers that live have ended it.

        Not of a session that is closed, which ends on all workers.
        """
        if self._is_closed:
            return
        for task in ask.pending():
            self._tell(task, {"kind": "abort", "step": ask.number, "why": f"the step was ended: {why}"})
        ask.settle(self._config.lost_seconds)

    def _take(self, number: int, who: Any, message: dict[str, Any]) -> None:
        """Act on an answer, in the link's thread."""
        task = self.tasks[number]
        peer = self._peers[task]
        self._silence.hear(task, time.monotonic(), message.get("sent", -math.inf))
        kind = message["kind"]
        if kind in ("pong", "unknown"):
            # What answers an earlier session was on its way while the worker was lost; and a ping of this one may
            # reach a worker before the message that opens it.
            is_of_this = self._name and message.get("session") == self._name
            if is_of_this and self._is_opened and peer.is_here and not message.get("has"):
                self._lose(task, "was started again, or forgot this session")
            elif is_of_this and peer.is_here and (most_seconds := self._config.node_seconds) is not None:
                node, seconds = max(message["busy"], key=lambda each: each[1], default=("", 0.0))
                if seconds >= most_seconds:
                    self._lose(
                        task, f"lags: {node!r} runs for {seconds:.1f} s; node_seconds is {most_seconds:g}"
                    )
            return
        is_lost = kind == "failed" and message["error"]["kind"] == WorkerLostError.kind
        if is_lost and self._name and message.get("session") == self._name:
            self._lose_link(message["error"]["text"])
        with self._lock:
            ask = self._asks.get(message.get("ask", -1))
        if ask is not None:
            ask.take(task, message)

    def _ping(self) -> None:
        """Tell all workers that this client lives, in the link's thread; they answer whether they know its session."""
        # Before their silence is looked at: `_begin` notes first that a worker was heard, and then that it is here.
        here = [task for task, peer in self._peers.items() if peer.is_here]
        silent = self._silence.too_long(time.monotonic())
        self._look_and_lose(
            {task: silent[task] for task in here if task in silent},
            "lags: Python there answers nothing for {:.1f} s, as in one long call; lag_seconds is "
            f"{self._config.lag_seconds}",
        )
        for task in here:
            if task not in silent:
                asks_busy = self._config.node_seconds is not None
                ping = {"kind": "ping", "session": self._name, "asks_busy": asks_busy}
                ping["sent"] = time.monotonic()
                self._link.ask(self.tasks.index(task), packed(ping))

    def _notice(self, numbers: set[int]) -> None:
        """Act on connections that were cut, in the link's thread."""
        here = [
            task for number, task in enumerate(self.tasks) if number in numbers and self._peers[task].is_here
        ]
        self._look_and_lose(
            dict.fromkeys(here, self._config.lost_seconds),
            "was cut off: a worker listens at its address; it was started again, or the network failed",
        )

    def _look_and_lose(self, silent: Mapping[str, float], is_there: str) -> None:
        """Give workers up that do not answer, each with what is at its address.

        silent: by task, for how many seconds. is_there: why, in a format for these, where a worker still is.
        """
        looks = look_at_all([self._peers[task].reached_at for task in silent])
        for (task, seconds), (at, more) in zip(silent.items(), looks, strict=True):
            says_nothing = f"did not answer for {seconds:.1f} s"
            why = {
                At.NOBODY: "has ended: nobody listens at its address",
                At.UNREACHED: f"{says_nothing}, and its address cannot be reached ({more})",
                At.SILENT: f"{says_nothing}: its process is there, and stopped, or hangs",
                At.OTHER: "has ended, or cannot be reached: what listens at its address is no worker",
                At.WORKER: is_there.format(seconds),
            }
            self._lose(task, why[at])

    def _refuse(self, number: int, who: Any, error: CorruptError) -> None:
        """Act on a message that cannot be read, in the link's thread: nobody would answer for it."""
        why = f"sent what cannot be read: {error}; the same version of Penstock has to be on each machine"
        self._lose(self.tasks[number], why)

    def _lose(self, task: str, why: str) -> None:
        with self._lock:
            self._peers[task].is_here = False
            asks = list(self._asks.values())
            self._lost, self._is_raised = self._lost_error(task, why, []), False
        for ask in asks:
            held = ask.holds.get(task, [])
            ask.fail(self._lost_error(task, why, held), gone=task)

    def _lose_link(self, why: str) -> None:
        """End all requests where a worker cannot reach another one, in the link's thread. Both may live."""
        error = WorkerLostError(why + _GOES_ON)
        with self._lock:
            if self._lost is not None:  # of a link, both ends tell
                return
            asks = list(self._asks.values())
            self._lost, self._is_raised = error, False
        for ask in asks:
            ask.fail(error)

    def _lost_error(self, task: str, why: str, held: Sequence[str]) -> WorkerLostError:
        of_step = f"; the step waits for {_named(held)} on it" if held else ""
        node = held[0] if held else ""
        return WorkerLostError(
            f"{task} (process {self._peers[task].pid}, {self._addresses[task]}) {why}{of_step}{_GOES_ON}",
            node=node,
            where=self.graph.nodes[node].where if node else "",
        )

    def note_raised(self, error: PenstockError) -> None:
        """Remember an error that was raised to the caller, who may run the next step after a loss."""
        self._is_raised = self._is_raised or isinstance(error, WorkerLostError)

    def forget(self, number: int) -> None:
        """Drop a request that is over."""
        with self._lock:
            self._asks.pop(number, None)

    # -- Closing ---------------------------------------------------------------------------------------------

    def end_workers(self) -> None:
        """Let each worker stop waiting for clients: `Worker.wait` returns there."""
        for task in self.tasks:
            self._tell(task, {"kind": "end"})

    def close(self) -> None:
        """End the session on all workers: runs that wait raise CancelledError. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            asks = list(self._asks.values())
        for ask in asks:
            ask.fail(CancelledError("the session was closed while this run was under way"))
        for task in self.tasks:
            self._tell(task, {"kind": "close"})
        self._link.close()
        if self._trace is not None:
            self._trace.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CancelledError("the session is closed")

    def __enter__(self) -> WorkerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: What a run asks for: endpoints, operations, and what is fed.
_Key = tuple[tuple[Endpoint, ...], tuple[str, ...], tuple[Endpoint, ...]]
#: Of what is fed.
_Shapes = tuple[tuple[int, ...], ...]
#: Shapes of feeds for which a cut knows the pace, those used last.
_MOST_SHAPES = 64


@dataclass(slots=True)
class _Cut:
    """What workers run for a step: parts by task, under a number; and the device of each node.

    runs: that are under way. is_over: no more begin. paces: of its workers, by the shapes of feeds.
    """

    number: int
    parts: dict[str, Part]
    device: Mapping[str, str]
    runs: int = 0
    is_over: bool = False
    paces: dict[_Shapes, Pace] = field(default_factory=dict)

    def pace_of(self, shapes: _Shapes, slowness: Mapping[str, float]) -> Pace:
        """Return the pace for feeds of some shapes. slowness: of workers, should it be new."""
        pace = self.paces[shapes] = self.paces.pop(shapes) if shapes in self.paces else Pace(slowness)
        if len(self.paces) > _MOST_SHAPES:
            del self.paces[next(iter(self.paces))]
        return pace


class _Peer:
    """What the client knows of a worker.

    is_here: between its first answer and its loss. reached_at: its address, without a name that would be looked up.
    slowness: how many times as long as usual it takes. brought: see `place_graph`.
    """

    def __init__(self) -> None:
        self.pid, self.reached_at = 0, ""
        self.is_here = False
        self.devices: list[str] = []
        self.brought: set[tuple[str, str]] = set()
        self.reference_seconds = self.clock_offset_seconds = 0.0
        self.slowness = 1.0


class _Ask:
    """A request to some workers, and their answers.

    holds: what each has to run for it. recorded: spans of those that answered, also that they failed; None of those
    that refused it.
    """

    def __init__(
        self, session: WorkerSession, number: int, tasks: list[str], holds: dict[str, list[str]]
    ) -> None:
        self.number, self.holds = number, holds
        self.recorded: dict[str, Any] = {}
        self._session = session
        self._pending = dict.fromkeys(tasks)
        self._answers: dict[str, dict[str, Any]] = {}
        self._error: PenstockError | None = None
        self._changed = threading.Condition()

    def pending(self) -> list[str]:
        """Return the workers that did not answer yet."""
        with self._changed:
            return list(self._pending)

    def take(self, task: str, message: dict[str, Any]) -> None:
        """Take an answer."""
        with self._changed:
            self._pending.pop(task, None)
            self.recorded[task] = message.get("recorded")
            if message["kind"] == "failed":
                self._error = self._error or _error_of(message["error"], task)
            else:
                self._answers[task] = message
            self._changed.notify_all()

    def fail(self, error: PenstockError, gone: str | None = None) -> None:
        """End the request with an error. gone: a worker that will not answer."""
        with self._changed:
            if gone is not None:
                self._pending.pop(gone, None)
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None) -> dict[str, dict[str, Any]]:
        """Return the answer of each worker.

        Raises: the first error; WaitTimeout.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            with self._changed:
                while self._pending and self._error is None:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise WaitTimeout(f"the run took longer than its timeout: {self._unfinished()}")
                    self._changed.wait(left)
                if self._error is not None:
                    self._session.note_raised(self._error)
                    raise self._error
                return self._answers
        finally:
            if not self._pending:
                self._session.forget(self.number)

    def _unfinished(self) -> str:
        """Return who did not answer, with what it has to run. Under the lock."""
        held = [(task, self.holds.get(task)) for task in self._pending]
        tasks = [task + (f" (with {_named(names)})" if names else "") for task, names in held]
        return f"{' and '.join(tasks)} {'has' if len(tasks) == 1 else 'have'} not finished"

    def settle(self, seconds: float) -> None:
        """Wait until all workers answered, so long at most."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._pending and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
        self._session.forget(self.number)


#: What a tensor keeps a worker from its kernels at most, to send or to receive it: above that, messages are under way.
_MOST_HOP_SECONDS = 2e-4


def _device_of(name: str, placed: Mapping[str, str]) -> str:
    """Return the device of a node, or of the loop that it is in; "" if there is none."""
    while name and name not in placed:
        name = name.rpartition("/")[0]
    return placed.get(name, "")


def _named(nodes: Sequence[str]) -> str:
    """Return the names of some nodes, of three at most."""
    return ", ".join(map(repr, nodes[:3])) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def _speed(ratio: float) -> float:
    """Return how much longer a machine takes than another; what may be noise is none."""
    return ratio if not 1 / _NOISE < ratio < _NOISE else 1.0


_BY_KIND = {
    each.kind: each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, GraphError)
}


def _error_of(document: Mapping[str, str], task: str) -> PenstockError:
    """Return the error that a worker reported."""
    kind = _BY_KIND.get(document["kind"], KernelError)
    text = document["text"] if document["kind"] in _BY_KIND else f"on {task}: {document['text']}"
    return kind(text, node=document["node"], where=document["where"])
