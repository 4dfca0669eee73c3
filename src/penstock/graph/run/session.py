"""Sessions: a graph, its state, and the runs of it."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.closing import Closeable
from penstock.graph.errors import CancelledError, GraphError, KernelError, MismatchError
from penstock.graph.model.graph import Graph
from penstock.graph.run.executor import Step
from penstock.graph.run.lower import Flat, Lowering
from penstock.graph.run.partition import check_of_one_process
from penstock.graph.run.plan import Plan, make_plan
from penstock.graph.run.reach import Inlined, needed_nodes
from penstock.graph.run.statistics import Statistics
from penstock.graph.run.timeline import Lane, timeline_of
from penstock.graph.run.wanted import Wanted, wanted_of
from penstock.graph.state.resources import Resources
from penstock.graph.state.saves import Saves, saving
from penstock.graph.state.tensors import read_state, write_state
from penstock.units import is_integer

#: Of a plan: what is asked for; whether loops are inlined, and what runs is counted.
_Key = tuple[Wanted, bool, bool]
#: Of the largest chunk that raises glibc's threshold (DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB), less its header and pages.
_LARGEST_RAISING_BYTES = (32 << 20) - (64 << 10)


@functools.cache
def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step, once for the process.

    When glibc frees a chunk that it had mapped, of up to 32 MiB, chunks of this size come from the heap from then on,
    and the heap is trimmed only when twice as much is free at its end (mallopt(3), "dynamic mmap threshold"; torch's
    posix_memalign is no exception). Any program that frees such a tensor gets there by chance. Before, a step may fetch
    up to 1,500 pages that the step before gave back, at 3 us each. No page of this tensor is touched; thresholds that
    the environment sets, such as MALLOC_TRIM_THRESHOLD_, stay as they are; other allocators are not affected.
    """
    torch.empty(_LARGEST_RAISING_BYTES, dtype=torch.uint8)


class Session(Closeable):
    """Runs a graph.

        with Session(graph, seed=0) as session:
            cost = session.run(c, {x: batch})

    A run executes in the thread that calls it; any number of threads may call, and the graph may grow meanwhile.
    """

    def __init__(
        self,
        graph: Graph | None = None,
        *,
        seed: int = 0,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        batches: Mapping[str, Iterable[Any] | Callable[[], Iterable[Any]]] | None = None,
        regions: bool = True,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        check_finite: bool = False,
        trace: str | os.PathLike[str] | None = None,
        resources: Resources | None = None,
        slowness: float = 1.0,
    ) -> None:
        """Open a session.

        graph: None: an empty one, for `extend`. seed: of all draws, 0 to 2**64 - 1. functions, batches: what Call and
        NextBatch nodes name; a function in place of batches makes them when they are first needed, and again after each
        `restore`; the session closes what it made. regions: whether pure nodes run as one function where they can.
        compiler: compiles these functions, such as torch.compile. check_finite: raise where a node gives NaN or
        infinity, naming it (slow).
        trace: a file for the timeline of all runs, which `penstock trace` and `penstock report` read; under `penstock
            watch` one in its run, unless given.
        resources: the state, of a session that shares its own with others; then what they bring is theirs, too.
        slowness: makes each kernel take so many times as long, to try how a placement copes.
        """
        _keep_freed_memory()
        self.graph = Graph() if graph is None else graph
        self.resources = resources or Resources(checked_seed(seed), functions, batches)
        self._owns_resources = resources is None
        self._regions = regions and not check_finite
        self._slowness = slowness
        self._compiler = compiler
        self._inlines = self._regions and compiler is None
        self._observe = _check_finite if check_finite else None
        self._plans: dict[_Key, Plan] = {}
        self._timeline = timeline_of(trace)
        self._steps: set[Step] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def extend(self, nodes: Any) -> None:
        """Add nodes to the graph, as `Graph.extend` does."""
        self._check_open()
        self.graph.extend(nodes)

    # -- Running ---------------------------------------------------------------------------------------------

    def run(
        self,
        fetches: Any = (),
        feeds: Mapping[Any, Any] | None = None,
        targets: Sequence[Any] = (),
        *,
        statistics: Statistics | None = None,
        timeout_seconds: float | None = None,
        number: int = 0,
        lane: Lane | None = None,
        begun: Callable[[], None] | None = None,
    ) -> Any:
        """Run what the fetches and targets need, and return the fetched values.

        fetches: one, or a list, tuple or mapping of edges or texts. "node:port" is a tensor; "node" is an operation,
            which runs and gives None.
        feeds: arrays in place of outputs, by edge or text; they are copied. targets: operations that run besides.
        statistics: filled with what ran. timeout_seconds: None waits for ever. number: by which `cancel` and nodes that
            send and receive tell this run from others. lane: records this run in place of the session's trace.
        begun: called as soon as `cancel` finds this run; what it raises ends it.
        Returns: NumPy arrays, the caller's own, arranged as `fetches` is.
        Raises: GraphErrors; WaitTimeout; KeyboardInterrupt passes. The session stays usable.
        """
        self._check_open()
        wanted, values, arrange = wanted_of(self.graph, fetches, feeds, targets)
        # Statistics count each kernel, so loops run node by node.
        timeline = self._timeline if lane is None else None
        counts = statistics is not None or lane is not None or timeline is not None
        inlines = self._inlines and statistics is None
        plan = self._plan((wanted, inlines, counts))
        if timeline is not None:
            lane = timeline.begin()
        step = Step(
            plan,
            values,
            self.resources,
            statistics,
            timeout_seconds,
            self._observe,
            lane,
            number,
            self._slowness,
        )
        del values
        with self._lock:
            self._steps.add(step)
        try:
            self._check_open()
            if begun is not None:
                begun()
            results = step.run()
            if lane is not None:
                lane.finish(0 if step.live is None else step.live.peak_bytes)
        except GraphError as error:
            # Without the frames of the executor, which would keep alive what the step had computed.
            raise _bare(error) from error.__cause__
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            with self._lock:
                self._steps.discard(step)
            if timeline is not None and lane is not None:
                timeline.end(lane)
        found = dict(zip(wanted.endpoints, results, strict=True))
        del results
        return arrange(found)

    def _plan(self, key: _Key) -> Plan:
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        with self.graph.lock:
            # Of threads that run it first at once, one makes it.
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = self._made(key)
            return plan

    def _made(self, key: _Key) -> Plan:
        wanted, inlines, counts = key
        is_part = self.resources.mail is not None
        if not is_part:
            check_of_one_process(needed_nodes(self.graph.nodes, *wanted)[0])
        lowering = Lowering(Inlined() if inlines else None)
        env = lowering.top(self.graph.scope, *wanted)
        for place, endpoint in enumerate(wanted.endpoints):
            node = self.graph.nodes[endpoint.node]
            port = env.find(endpoint)
            spec = node.outputs[endpoint.port]
            if spec.kind == "variable" and endpoint not in wanted.fed:
                port = lowering.read(port, spec, node)
            attr = {"fetch": place, "node": node.name, "where": node.where}
            lowering.add("Fetch", [port], attr=attr, name=str(endpoint), counts=False)
        # A worker's part has its nodes in the order in which they are to run.
        turns = {name: turn for turn, name in enumerate(self.graph.nodes)} if is_part else None
        plan = make_plan(
            lowering.flats,
            self.resources,
            regions=self._regions,
            compiler=self._compiler,
            turns=turns,
            counts=counts,
        )
        if any(unit.frame for unit in plan.units if unit.flat.op == "Fetch"):
            raise MismatchError("a tensor inside of a loop was fetched; Leave brings one out of it")
        return plan

    # -- State -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Save variables, queues, positions of readers and counts of draws together, as a snapshot."""
        self._check_open()
        write_state(folder, self.resources.state())

    def restore(self, folder: str) -> None:
        """Continue from what `save` wrote; call it while no run is under way.

        Raises: NotFoundError if nothing was saved there, MismatchError if Save nodes wrote it.
        """
        self._check_open()
        self.resources.load(read_state(folder))

    def saving(self, folder: str, schedule: Any, *, keep: int = 1) -> AbstractContextManager[Saves]:
        """Continue from the newest state of a folder, if there is one, and save there when the schedule says.

            with session.saving("runs/a", "1000 steps") as saves:
                for step in range(saves.step, 90_000):
                    session.run(train)
                    saves.after(step + 1)

        schedule: as a `SnapshotStore` takes it: "1000 steps", "10 minutes" ... keep: how many states stay.
        Raises: ConfigError if it is no schedule; MismatchError if the folder holds tensors of Save nodes.
        """
        self._check_open()
        return saving(self.resources, folder, schedule, keep)

    def waits(self) -> list[str]:
        """Return one line for each node that waits: which, for how long."""
        return [line for step in self.steps() for line in step.waits()]

    def steps(self) -> list[Step]:
        """Return the runs that are under way."""
        with self._lock:
            return list(self._steps)

    def cancel(self, number: int, error: BaseException) -> None:
        """End the runs of a number with an error, where any are under way."""
        for step in self.steps():
            if step.number == number:
                step.cancel(error)

    # -- Closing ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session: runs that wait raise CancelledError. May be called twice."""
        with self._lock:
            self._is_closed = True
            steps = list(self._steps)
            self._plans.clear()
        for step in steps:
            step.cancel(CancelledError("the session was closed while this run was under way"))
        if self._owns_resources:
            self.resources.close()
        if self._timeline is not None:
            self._timeline.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CancelledError("the session is closed")


def checked_seed(seed: Any) -> int:
    """Return a seed of all draws. Raises: MismatchError."""
    if not is_integer(seed) or not 0 <= seed < 2**64:
        raise MismatchError(f"seed is {seed!r:.40}; give an integer from 0 to 2**64 - 1")
    return int(seed)


def _bare(error: GraphError) -> GraphError:
    if error.__cause__ is not None:
        traceback.clear_frames(error.__cause__.__traceback__)
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(None)


def _check_finite(flat: Flat, outputs: Sequence[Any]) -> None:
    for port, value in enumerate(outputs):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                raise KernelError(
                    f"output {port} of {flat.op} has {bad} of {value.numel()} elements that are NaN or infinite",
                    node=flat.name,
                    where=flat.where,
                )
