"""A session whose nodes run on workers: the client places them, cuts each run into parts, and asks once per worker.

`WorkerSession` is what users have of it: it runs steps, and saves and restores their state. `requests` asks the
workers and notices who is lost; `placement` decides where nodes run, and what each worker runs of a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Unpack

from penstock.closing import Closeable
from penstock.graph.model.dtypes import to_client
from penstock.graph.model.graph import Graph
from penstock.graph.model.node import Endpoint
from penstock.graph.run.partition import task_of
from penstock.graph.run.reach import inner_nodes
from penstock.graph.run.statistics import Statistics
from penstock.graph.run.wanted import wanted_of
from penstock.graph.state.resources import check_state
from penstock.graph.state.saves import Saves, saving
from penstock.graph.state.tensors import read_state, write_state
from penstock.graph.tools.placing import read_devices
from penstock.graph.workers.access import checked_workers
from penstock.graph.workers.config import SessionArguments, SessionConfig, session_config
from penstock.graph.workers.lanes import StepWriter
from penstock.graph.workers.link_probe import LinkProbe
from penstock.graph.workers.placement import Cut, SessionPlacement, device_of
from penstock.graph.workers.requests import Requests
from penstock.policy.graph_placement import Placement
from penstock.report import print_report


class WorkerSession(Closeable):
    """Runs a graph on workers.

        with WorkerSession(graph, {"/job:ps/task:0": "tcp://a:4242", ...}, secret) as session:
            cost = session.run(c, {x: batch})

    It is used as a `Session`, and gives the same bits. A node runs where its `device` says, such as "/job:ps/task:0";
    what is free runs where it finishes first.
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
        machine = read_devices(config.machine)
        self._folder: str | None = None
        #: Of a `saving` that is open: what it saved is gone back to before that of `_folder`.
        self._saves: Saves | None = None
        self._trace = None if trace is None else StepWriter(trace, self.tasks)
        self._requests = Requests(self.graph, self._addresses, secret, config, report)
        self._placement = SessionPlacement(self.graph, config, machine, self._requests, report)
        try:
            self._begin()
            self._placement.read_costs()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Open the session on all workers. Raises: as of the constructor."""
        self._requests.greet()
        self._placement.check_devices()
        self._placement.drop_cuts()
        self._requests.open()

    def _begin_anew(self) -> None:
        """Open the session once more, and continue from the last save; without one, anew."""
        self._begin()
        if not (self._saves is not None and self._saves.go_back()) and self._folder is not None:
            self.load(read_state(self._folder))

    # -- Running ---------------------------------------------------------------------------------------------

    def extend(self, nodes: Any) -> None:
        """Add nodes to the graph, as `Graph.extend` does."""
        self._requests.check_open()
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
        self._requests.check_open()
        wanted, values, arrange = wanted_of(self.graph, fetches, feeds, targets)
        self._requests.recover(self._begin_anew)
        endpoints, fed = wanted.endpoints, wanted.fed
        found: dict[Endpoint, Any] = {
            endpoint: to_client(value)
            for endpoint, value in zip(fed, values, strict=True)
            if endpoint in endpoints
        }
        cut = self._placement.begin(wanted)
        begin, took = time.perf_counter(), None
        try:
            answers = self._step(cut, fed, values, statistics, timeout_seconds) if cut.parts else {}
            took = time.perf_counter() - begin
        finally:
            self._placement.end(wanted, cut, took)
        if statistics is None:
            shapes = tuple(tuple(value.shape) for value in values)
            self._placement.notice_pace(cut, shapes, answers, took)
        for task, answer in answers.items():
            results = zip(cut.parts[task].fetches, answer["values"], strict=True)
            found.update({endpoints[place]: value for place, value in results})
            if statistics is not None:
                _count(statistics, task, answer["statistics"], cut.device)
        return arrange(found)

    def _step(
        self,
        cut: Cut,
        fed: Sequence[Endpoint],
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
        holds = {task: list(part.holds) for task, part in cut.parts.items()}
        ask = self._requests.ask(messages, holds)
        traced = None if self._trace is None else self._trace.begin()
        try:
            return ask.wait(timeout_seconds)
        except BaseException as error:
            self._requests.abort(ask, str(error) or type(error).__name__)
            raise
        finally:
            if self._trace is not None and traced is not None:
                offset = {task: peer.clock_offset_seconds for task, peer in self._requests.peers.items()}
                answered = dict(ask.recorded)  # of a worker that is late, more may come
                recorded = {task: each for task, each in answered.items() if each is not None}
                missing = len(cut.parts) - len(answered)
                self._trace.end(
                    *traced, recorded, missing, offset, lambda name: task_of(cut.device.get(name, ""))
                )

    # -- Placement -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[str]:
        """Return the devices of all workers, those of the machine first, which are preferred."""
        return self._placement.devices

    @property
    def processes(self) -> dict[str, int]:
        """Return the process id of each task."""
        return {task: peer.pid for task, peer in self._requests.peers.items()}

    def placement(self) -> Placement:
        """Return where each node of the graph runs, and why.

        A node stays where it was placed first. While runs after `learn` try placements in turn, it is the one that all
        other runs have; `Statistics.devices` of a run says where its nodes ran. Raises: InfeasibleError,
        UnsupportedError.
        """
        return self._placement.placement()

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
        return self._placement.learn(
            lambda statistics: self.run(fetches, feeds, targets, statistics=statistics), self._measured_links
        )

    def _measured_links(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return the latency and the bytes a second between each two workers."""
        probe = LinkProbe(self.tasks)
        config = replace(self._config, costs=None, regions=False, check_finite=False)
        with WorkerSession(probe.graph, self._addresses, self._secret, config, report=None) as session:
            return probe.measure(session.run)

    # -- State -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Save the state of all workers as one snapshot, as `Session.save` does; call it while no run is under way."""
        self._requests.check_open()
        write_state(folder, self.state())
        self._folder = folder

    def restore(self, folder: str) -> None:
        """Continue from what `save` of this or of a `Session` wrote; call it while no run is under way.

        Raises: WorkerLostError if a worker was lost since the last run.
        """
        self._requests.check_open()
        self.load(read_state(folder))
        self._folder = folder

    def saving(self, folder: str, schedule: Any, *, keep: int = 1) -> AbstractContextManager[Saves]:
        """Continue from the newest state of a folder, and save there when the schedule says: see `Session.saving`.

        After a WorkerLostError inside of it, resume at `step` of what it gave: the next run begins with that state, or
        anew where it is 0.
        """
        self._requests.check_open()
        self._requests.recover(self._begin_anew, is_asked=True)
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
        answers = self._requests.ask({task: {"kind": "state"} for task in self.tasks}, holds={}).wait(None)
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
        self._requests.ask({task: {"kind": "load", "state": shares[task]} for task in shares}, holds={}).wait(
            None
        )

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
            shares[task_of(self._placement.device_of(name)) or self.tasks[0]]["runs"].append([name, count])
        return shares

    # -- Closing ---------------------------------------------------------------------------------------------

    def end_workers(self) -> None:
        """Let each worker stop waiting for clients: `Worker.wait` returns there."""
        for task in self.tasks:
            self._requests.tell(task, {"kind": "end"})

    def close(self) -> None:
        """End the session on all workers: runs that wait raise CancelledError. May be called twice."""
        self._requests.close()
        if self._trace is not None:
            self._trace.close()


def _count(statistics: Statistics, task: str, counted: Mapping[str, Any], placed: Mapping[str, str]) -> None:
    """Add what a worker counted of its own nodes; Sends and Recvs are none."""
    statistics.received_bytes[task] = counted["received_bytes"]
    statistics.add_live(task, counted["live_bytes"])
    for name, count in counted["kernels"].items():
        device = device_of(name, placed)
        if task_of(device) == task:
            statistics.kernels[name] = statistics.kernels.get(name, 0) + count
            statistics.seconds[name] = statistics.seconds.get(name, 0.0) + counted["seconds"][name]
            statistics.devices[name] = device
            if name in counted["nbytes"]:
                statistics.nbytes[name] = counted["nbytes"][name]
