"""A graph on workers gives the bits of one process; what fails on one ends the step on all, by name."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import math
import os
import re
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty
from random import Random
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.graph.clusters import SECRET, TASKS, new_worker, opened
from tests.graph.graphs import any_value, node
from tests.patience import patient, wait_until

from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.graph import (
    CancelledError,
    CorruptError,
    Graph,
    InfeasibleError,
    KernelError,
    MismatchError,
    SampleReader,
    Session,
    Statistics,
    UnsupportedError,
    VersionError,
    WorkerLostError,
    gradients,
    place_graph,
    write_tfrecords,
)
from penstock.graph.ops.table import operation
from penstock.graph.run.partition import task_of
from penstock.graph.workers import LocalWorkers, SessionConfig, lanes, reaching, wire
from penstock.graph.workers import mail as mailing
from penstock.graph.workers import placement as placing_nodes
from penstock.graph.workers import requests as requesting
from penstock.graph.workers import session as client
from penstock.graph.workers import worker as hosting
from penstock.graph.workers.access import versions_here
from penstock.graph.workers.host import HostLink
from penstock.graph.workers.link_probe import LinkProbe
from penstock.graph.workers.mail import Mail
from penstock.graph.workers.requests import Ask, Requests
from penstock.graph.workers.session import WorkerSession
from penstock.graph.workers.wire import ValuesPacker, packed, unpacked, unpacked_values
from penstock.graph.workers.worker import Worker
from penstock.loader.decode_serving import serving
from penstock.measure.chrome import write_chrome
from penstock.measure.graph_steps import explain_graph
from penstock.policy import graph_pace, graph_search
from penstock.policy.graph_placement import USUAL_BYTES_PER_SECOND, USUAL_LATENCY_SECONDS, Placement
from penstock.policy.graph_trial import PlacementTrial
from penstock.queues import WakingQueue
from penstock.ranks import carrier_zmq
from penstock.ranks import reaching as looking
from penstock.ranks.access import Address
from penstock.store import ImageFolder
from penstock.trace import Kind, read_trace


@pytest.fixture
def workers() -> Iterator[dict[str, str]]:
    """Three workers of this process; their addresses."""
    started = [new_worker(task) for task in TASKS]
    yield {each.task: each.address for each in started}
    for each in started:
        each.close()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 2 else pytest.mark.slow) for seed in range(60)]
)
def test_a_random_graph_parted_at_random_gives_the_bits_of_one_process(
    workers: dict[str, str], seed: int
) -> None:
    """Loops, conditions, their gradients, draws, and a variable that one worker changes and all read."""
    random, generator = Random(seed), np.random.default_rng(seed)
    graph = Graph()
    xs = [graph.placeholder("float64", [2], name=f"x{place}") for place in range(3)]
    pool, count = list(xs), graph.placeholder("int32", [], name="count")
    with graph.on_device(random.choice(TASKS)):
        w = graph.variable("float64", [2], initial=np.ones(2), name="w")
        read = graph.add("Read", w)
    for _ in range(6):
        with graph.on_device(random.choice(TASKS)):
            pool.append(any_value(graph, random, [*pool, read], [count]))
            pool.append(pool[-1] * graph.add("RandomUniform", shape=[2], dtype="float64"))
    y = graph.add("Sum", graph.add("Concat", *pool[3:], axis=0))
    slopes = [each for each in gradients(graph, y, xs) if each is not None]
    train = graph.add("AssignAdd", w, slopes[0] if slopes else pool[-1], controls=[y.endpoint.node])
    init = graph.initialize_all()
    feeds: dict[str, Any] = {f"x{place}": generator.normal(size=2) for place in range(3)}
    feeds["count"] = int(generator.integers(4))
    with opened(graph, workers, seed=seed) as parted, Session(graph, seed=seed) as whole:
        for each in (parted, whole):
            each.run(init)
        for _ in range(2):
            counted, expected = Statistics(), Statistics()
            found = parted.run([y, *slopes, train, "x0:0"], feeds, statistics=counted)
            for one, other in zip(
                found, whole.run([y, *slopes, train, "x0:0"], feeds, statistics=expected), strict=True
            ):
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
        assert {name: counted.kernels[name] for name in counted.kernels} == expected.kernels


def test_the_state_of_all_workers_is_that_of_one_session(workers: dict[str, str], tmp_path: Any) -> None:
    graph = Graph()
    with graph.on_device(TASKS[1]):
        total = graph.variable("int64", [], initial=0, name="total")
        queue = graph.add("FIFOQueue", capacity=9, components=[["int64", []]], name="queue")
    with graph.on_device(TASKS[2]):
        draw = graph.add("RandomUniform", shape=[2], name="draw")
        names = graph.variable("bytes", [2], initial=np.array([b"\xff", b""], object), name="names")
    put = graph.add_node("Enqueue", queue, graph.add("AssignAdd", total, graph.constant(1, dtype="int64")))
    get = graph.add("Dequeue", queue)
    init = graph.initialize_all()
    with opened(graph, workers, seed=5) as parted:
        parted.run(init)
        for _ in range(3):
            parted.run([put, draw])
        parted.save(str(tmp_path))
        expected = parted.run([get, draw, total, names])
    by_value = opened(graph, workers, config=SessionConfig(seed=5))
    with Session(graph, seed=5) as whole, by_value as again:
        for each in (whole, again):
            each.restore(str(tmp_path))
            for one, other in zip(each.run([get, draw, total, names]), expected, strict=True):
                assert np.array_equal(one, other)
    assert expected[0] == 1
    assert expected[2] == 3
    assert expected[3].tolist() == [b"\xff", b""]


def test_an_error_of_one_worker_ends_the_step_on_all_and_takes_nothing(workers: dict[str, str]) -> None:
    """The second worker waits for what the first fails to give, and the third for an element of a queue."""
    graph = Graph()
    x = graph.placeholder("float32", [], name="x")
    with graph.on_device(TASKS[0]):
        bad = graph.add("Call", x, function="fail", outputs=[["float32", []]], name="bad")
    with graph.on_device(TASKS[1]):
        after = graph.add("Neg", bad, name="after")
    with graph.on_device(TASKS[2]):
        queue = graph.add("FIFOQueue", capacity=2, components=[["float32", []]], name="queue")
        get = graph.add("Dequeue", queue, name="get")
        put = graph.add_node("Enqueue", queue, x, name="put")
    with opened(graph, workers) as session:
        with pytest.raises(KernelError, match=r"node 'bad' .*the disk is gone"):
            session.run([after, get], {x: 1.0})
        with pytest.raises(WaitTimeout, match=r"task:2 \(with 'get', 'queue'\) has not finished"):
            session.run(get, timeout_seconds=0.05)
        waiting = threading.Thread(target=lambda: found.append(session.run(get)))
        found: list[Any] = []
        waiting.start()
        session.run(put, {x: 7.0})
        waiting.join(patient(30))
        assert found == [7.0]


@pytest.mark.parametrize(("busy_until", "seconds"), [(1.0, 0.0003), (math.inf, 0.03)])
def test_a_worker_that_starts_on_a_busy_machine_is_not_found_slow(
    busy_until: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products of its first second take a hundred times as long; on another machine, all do."""
    now = [0.0]

    def multiply(*_: Any) -> None:
        now[0] += 0.03 if now[0] < busy_until else 0.0003

    def sleep(pause: float) -> None:
        now[0] += pause

    monkeypatch.setattr(
        hosting, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep, monotonic=lambda: now[0])
    )
    monkeypatch.setattr(torch, "mm", multiply)
    assert hosting._reference_seconds() == pytest.approx(seconds)


def test_a_slow_worker_is_avoided_once_a_run_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the preferred one as long as nothing is known, and keeps the variable."""
    times = iter([5.0, 1.0])
    monkeypatch.setattr(hosting, "_reference_seconds", lambda: next(times))
    graph = Graph()
    with graph.on_device(TASKS[0]):
        w = graph.variable("float32", [300, 300], initial=np.eye(300, dtype=np.float32), name="w")
    x = graph.placeholder("float32", [300, 300], name="x")
    y = x
    for number in range(3):
        y = graph.add("MatMul", y, y, name=f"product{number}")
    total = graph.add("Sum", y + w, name="total")
    slow, fast = new_worker(TASKS[0]), new_worker(TASKS[1])
    feeds = {x: np.eye(300, dtype=np.float32)}
    init = graph.initialize_all()
    monkeypatch.setattr(LinkProbe, "measure", lambda probe, run: {tuple(TASKS[:2]): (2e-6, 1e9)})
    products: list[str] = []
    multiply = operation("MatMul").kernels["cpu"]

    def counted(node: Any) -> Any:
        kernel = multiply(node)

        def call(*values: Any, **where: Any) -> Any:
            products.append(node.name)
            return kernel(*values, **where)

        return call

    monkeypatch.setitem(operation("MatMul").kernels, "cpu", counted)
    with opened(graph, {TASKS[0]: slow.address, TASKS[1]: fast.address}) as session:
        session.run(init)
        assert session.run(total, feeds) == 600
        assert set(session.placement().device.values()) == {f"{TASKS[0]}/device:cpu:0"}
        products.clear()
        costs = session.learn(total, feeds)
        # The faster of the last two counts.
        assert products == [f"product{number}" for number in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
        assert session.run(total, feeds) == 600
        device = session.placement().device
    slow.close()
    fast.close()
    assert (costs["product1"]["bytes"], costs["product1"]["hop"]) == (300 * 300 * 4, 1e-6)
    assert costs["product1"]["cost"][f"{TASKS[0]}/device:cpu:0"] == pytest.approx(
        5 * costs["product1"]["cost"][f"{TASKS[1]}/device:cpu:0"]
    )
    assert device["w"] == f"{TASKS[0]}/device:cpu:0"
    assert device["product1"] == f"{TASKS[1]}/device:cpu:0"


@pytest.mark.parametrize(("learns", "is_refused"), [(False, False), (True, False), (True, True)])
def test_a_worker_that_becomes_slower_is_named_and_avoided_where_the_session_has_learned(
    learns: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is preferred, and the faster one, until it is said to have five times as long to do in a step."""
    monkeypatch.setattr(hosting, "_reference_seconds", iter([1.0, 1.6]).__next__)
    monkeypatch.setattr(LinkProbe, "measure", lambda probe, run: {tuple(TASKS[:2]): (1e-9, 1e12)})
    monkeypatch.setattr(graph_pace, "_LEAST_SECONDS", 0.0)
    is_slow, reported, run = threading.Event(), list[str](), hosting._Hosted.run

    def timed(hosted: Any, *step: Any) -> Any:
        has_to_do = 500.0 if is_slow.is_set() and hosted._task == TASKS[0] else 100.0
        answer = run(hosted, *step)
        assert answer["busy_seconds"] > 0
        return {**answer, "busy_seconds": has_to_do}

    monkeypatch.setattr(hosting._Hosted, "run", timed)
    both = [new_worker(task) for task in TASKS[:2]]
    graph = Graph()
    x = graph.placeholder("float32", [2], name="x")
    y = graph.add("Exp", x, name="y")
    with graph.on_device(TASKS[1]):
        z = graph.add("Neg", y, name="z")
    addresses = {each.task: each.address for each in both}
    home = f"{TASKS[0]}/device:cpu:0"
    with WorkerSession(
        graph, addresses, SECRET, report=reported.append, objective="latency", lag_seconds=patient(3.5)
    ) as session:
        if learns:
            session.learn(z, {x: [1, 2]})
        for _ in range(17):
            before = session.run(z, {x: [1, 2]})
        assert session.placement().device["y"] == home
        assert not reported
        is_slow.set()
        if is_refused:  # as where the memory of no device is enough

            def refuse(*_: Any, **__: Any) -> Placement:
                raise InfeasibleError("no device has 60 B left", node="y")

            monkeypatch.setattr(placing_nodes, "place_nodes", refuse)
        for _ in range(24):
            assert np.array_equal(session.run(z, {x: [1, 2]}), before)
        if not learns:
            assert session.placement().device["y"] == home
            session.learn(z, {x: [1, 2]})
        assert session.placement().device["y"] == (home if is_refused else f"{TASKS[1]}/device:cpu:0")
        assert np.array_equal(session.run(z, {x: [1, 2]}), before)
    for each in both:
        each.close()
    assert reported == [
        f"{TASKS[0]} has become 5.0 times slower: its part of a step takes 500 s in place of 100 s; another program "
        "may run there, or its processor is throttled; "
        + (
            "nodes stay where they are, as no other placement is possible: node 'y': no device has 60 B left"
            if is_refused
            else "nodes are placed anew by that"
            if learns
            else "learn() places nodes by that"
        )
    ]


def test_a_worker_is_slow_once_for_all_that_runs_until_it_is_as_fast_as_before_and_larger_feeds_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "_reference_seconds", iter([1.0, 1.6]).__next__)
    monkeypatch.setattr(LinkProbe, "measure", lambda probe, run: {tuple(TASKS[:2]): (1e-9, 1e12)})
    monkeypatch.setattr(graph_pace, "_LEAST_SECONDS", 0.0)
    is_slow, size, reported, run = threading.Event(), [2], list[str](), hosting._Hosted.run

    def timed(hosted: Any, *step: Any) -> Any:
        times = (5 if is_slow.is_set() else 1) if hosted._task == TASKS[0] else 0.01
        return {**run(hosted, *step), "busy_seconds": 50.0 * times * size[0]}

    monkeypatch.setattr(hosting._Hosted, "run", timed)
    both = [new_worker(task) for task in TASKS[:2]]
    graph = Graph()
    x = graph.placeholder("float32", [None], name="x")
    y = graph.add("Exp", x, name="y")
    ends = [graph.add("Neg", y, name=f"end{number}", device=TASKS[number]) for number in range(2)]
    graph.add("Neg", y, name="idle")
    with WorkerSession(
        graph,
        {each.task: each.address for each in both},
        SECRET,
        report=reported.append,
        objective="latency",
        costs={"idle": {"bytes": 4}},  # and no seconds
        lag_seconds=patient(3.5),
    ) as session:

        def device_after(steps: int) -> str:
            for _ in range(steps):
                for fetches in (ends, [*ends, y]):
                    session.run(fetches, {x: np.ones(size[0], np.float32)})
            return task_of(session.placement().device["y"])

        given = session.learn([*ends, y], {x: [1, 2]})
        learned = copy.deepcopy(given)
        given["y"]["cost"].clear()  # the caller's own
        assert device_after(17) == TASKS[0]
        size[0] = 8
        assert device_after(24) == TASKS[0]
        assert not reported
        for _ in range(2):
            is_slow.set()
            assert device_after(40) == TASKS[1]
            assert len(reported) == 1
            assert session._placement.costs()["y"]["cost"] == {
                f"{TASKS[0]}/device:cpu:0": pytest.approx(
                    5 * learned["y"]["cost"][f"{TASKS[0]}/device:cpu:0"]
                ),
                f"{TASKS[1]}/device:cpu:0": learned["y"]["cost"][f"{TASKS[1]}/device:cpu:0"],
            }
            is_slow.clear()
            assert device_after(40) == TASKS[0]
            assert [text.partition(":0 ")[2].partition(":")[0] for text in reported] == [
                "has become 5.0 times slower",
                "is as fast as before",
            ]
            reported.clear()
    for each in both:
        each.close()


def test_steps_after_learning_try_placements_and_the_fastest_stays(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Steps are said to be fastest with all on the third worker; a variable and what changes it stay where they are."""

    class Told(PlacementTrial):
        def end(self, turn: int, seconds: float | None) -> Placement | None:
            tried = {self.placements[turn].device[name] for name in ("double", "negate")}
            return super().end(turn, 1.0 if tried == {f"{TASKS[2]}/device:cpu:0"} else 2.0)

    monkeypatch.setattr(placing_nodes, "PlacementTrial", Told)
    links = dict.fromkeys(itertools.combinations(TASKS, 2), (1e-9, 1e12))
    monkeypatch.setattr(LinkProbe, "measure", lambda probe, run: links)
    # What nodes take is noise here. So the third worker is slow enough to have nothing, not enough to be left out.
    monkeypatch.setattr(graph_search, "_LEAST_MOVED", 0.0)
    speeds = iter([1.0, 1.0, 1.6])
    monkeypatch.setattr(hosting, "_reference_seconds", lambda: next(speeds))
    parts, make_part = weakref.WeakSet[Any](), hosting._Hosted.make_part

    def seen(hosted: Any, message: Any) -> Any:
        part = make_part(hosted, message)
        parts.add(part.session)
        return part

    monkeypatch.setattr(hosting._Hosted, "make_part", seen)
    workers = request.getfixturevalue("workers")
    graph = Graph()
    w = graph.variable("float64", [], initial=np.float64(3), name="w")
    more = graph.add("AssignAdd", w, np.float64(1), name="more")
    x = graph.placeholder("float64", [], name="x")
    double, negate = graph.add("Mul", x, np.float64(2), name="double"), graph.add("Neg", x, name="negate")
    total = graph.add("Add", graph.add("Add", double, negate), more, name="total")
    init = graph.initialize_all()
    with opened(graph, workers) as session:
        session.run(init)
        session.learn(total, {x: 5.0})
        homes, simulated = set[str](), session.placement()
        for step in range(40):
            assert session.placement() is simulated or not session._placement._trials
            counted = Statistics()
            assert session.run(total, {x: 5.0}, statistics=counted) == 5 + 3 + 2 + step
            assert counted.kernels["double"] == 1
            assert {counted.devices[name] for name in ("w", "more")} == {f"{TASKS[0]}/device:cpu:0"}
            homes.add(counted.devices["double"])
            # Other runs go on meanwhile.
            assert session.run(negate, {x: 5.0}) == -5
        assert len(homes) > 1
        found = session.placement()
        assert {found.device[name] for name in ("double", "negate")} == {f"{TASKS[2]}/device:cpu:0"}
        assert found.reason["double"].startswith("a step took 1 s so, and 2 s where")
        assert session.run(total, {x: 5.0}) == 5 + 3 + 2 + 40
        # Parts of two workers for it, one for the other run, and none of what is over, which is forgotten soon.
        wait_until(lambda: gc.collect() >= 0 and len(parts) == 3)
        session.learn(total, {x: 5.0})
        assert [session.run(total, {x: 5.0}) for _ in range(3)] == [5 + 3 + 2 + 40 + 2 + n for n in range(3)]
        # Nodes that come during a trial end it: they were not placed in it, and what it ran is forgotten.
        again = graph.add("Neg", total, name="again")
        assert session.run(again, {x: 5.0}) == -session.run(total, {x: 5.0}) + 1
        assert session.run(total, {x: 5.0}) == 5 + 3 + 2 + 40 + 7
        of_both = sum(len(cut.parts) for cut in session._placement._cuts.values())
        wait_until(lambda: gc.collect() >= 0 and len(parts) == of_both)


def test_a_worker_runs_nodes_in_the_order_of_the_placement_and_lets_no_other_wait_for_a_region(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent comes first, although the others could be one region with it, and are asked for first."""
    events: list[str] = []
    negate = operation("Neg").kernels["cpu"]

    def recorded(node: Any) -> Any:
        kernel = negate(node)

        def call(*values: Any, **where: Any) -> Any:
            events.append(node.name)
            return kernel(*values, **where)

        return call

    def mail(send: Any, *rest: Any) -> Mail:
        def recorded_send(to: str, step: int, node: str, values: Any) -> None:
            if to == TASKS[1]:
                events.append(f"{'ask for' if values is None else 'send'} {node}")
            send(to, step, node, values)

        return Mail(recorded_send, *rest)

    monkeypatch.setitem(operation("Neg").kernels, "cpu", recorded)
    monkeypatch.setattr(hosting, "Mail", mail)
    graph = Graph()
    with graph.on_device(TASKS[0]):
        x = graph.placeholder("float32", [2], name="x")
        y = graph.placeholder("float32", [2], name="y")
        here = graph.add("Neg", y, name="away")
        chain = [x]
        for number in range(4):
            chain.append(graph.add("Neg", chain[-1], name=f"n{number}"))
    with graph.on_device(TASKS[1]):
        there = graph.add("Exp", here, name="there")
    with graph.on_device(TASKS[0]):
        total = graph.add("Add", there, chain[-1], name="total")
    cost = {f"{task}/device:cpu:0": 1.0 for task in TASKS}
    costs = {name: {"cost": cost, "bytes": 8} for name in ("away", "there", "total", "n0", "n1", "n2", "n3")}
    latency = {"link_latency_seconds": 0.5, "link_bytes_per_second": 1e9}
    with opened(graph, workers, costs=costs, **latency) as session:
        found = session.run(total, {x: np.array([1, 2], np.float32), y: np.zeros(2, np.float32)})
    assert found.tolist() == [2, 3]
    # "total" may start at 5: "there", which takes the link for half a second, is asked for by 4.5, when n2 has ended.
    assert events == ["away", "send away", "n0", "n1", "n2", "ask for there", "n3"]


def test_a_worker_offers_its_cpu_alone_and_who_asks_for_a_gpu_is_told_what_there_is(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    graph = Graph()
    x = graph.constant(1.0, name="x")
    cpus = [f"{task}/device:cpu:0" for task in TASKS]
    with opened(graph, workers) as session:
        assert session.devices == cpus
        assert session.run(x) == 1
        assert session.placement().device["x"] == cpus[0]
        for asked in ("/device:gpu:0", "/job:worker/task:1/device:cuda:0", "cuda"):
            graph = Graph()
            y = graph.add("Neg", graph.constant(1.0), name="y", device=asked)
            with opened(graph, workers) as other, pytest.raises(InfeasibleError) as refused:
                other.run(y)
            assert str(refused.value).endswith(
                f"'y' asks for {asked!r}, and nobody has that: there are {', '.join(cpus)}"
            )


def test_what_links_take_is_learned_from_chains_of_hops(workers: dict[str, str]) -> None:
    """Each hop takes 2 ms and a second for 1 MB on a clock of its own; each run 5 ms besides, whatever it is."""
    probe, now = LinkProbe(TASKS), 0.0
    with opened(probe.graph, workers) as session:

        def run(targets: list[Any]) -> None:
            nonlocal now
            session.run(targets=targets)
            name, hops = targets[0].endpoint.node, 0
            while inputs := probe.graph.nodes[name].inputs:
                sender = session.placement().device[inputs[0].node]
                assert sender != session.placement().device[name]
                name, hops = inputs[0].node, hops + 1
            now += 5e-3 + hops * (2e-3 + 4e-6 * probe.graph.nodes[name].attr["shape"][0])

        found = probe.measure(run, lambda: now)
    assert set(found) == {(TASKS[0], TASKS[1]), (TASKS[0], TASKS[2]), (TASKS[1], TASKS[2])}
    assert list(found.values()) == [pytest.approx((2e-3, 1e6), rel=0.01)] * 3


def test_links_that_noise_hides_are_taken_as_usual() -> None:
    probe, noise, now = LinkProbe(TASKS), Random(5), 0.0

    def run(targets: list[Any]) -> None:
        nonlocal now
        now += 5e-3 + 1e-3 * noise.random()

    found = probe.measure(run, lambda: now)
    assert set(found.values()) == {(USUAL_LATENCY_SECONDS, USUAL_BYTES_PER_SECOND)}


def test_a_machine_says_what_a_device_holds_and_which_is_preferred(
    workers: dict[str, str], tmp_path: Any
) -> None:
    devices = [f"{task}/device:cpu:0" for task in TASKS]
    file = tmp_path / "machine.toml"
    file.write_text(MACHINE.format(devices[2], devices[1]))
    graph = Graph()
    w = graph.variable("float32", [100], initial=np.ones(100, np.float32), name="w")
    total = graph.add("Sum", graph.add("Read", w), name="total")
    init = graph.initialize_all()
    with opened(graph, workers, machine=file) as session:
        assert session.devices == [devices[2], devices[1], devices[0]]
        session.run(init)
        assert session.run(total) == 100
        assert session.placement().device["w"] == devices[1]
    own = MACHINE.partition("[[device]]")
    for text, wrong in (
        (own[1] + own[2] + "speed = 1", r"machine\.toml: device\[1\]\.speed is not a field"),
        ("ranks = 2\n" + own[1] + own[2], "ranks is not a field"),
        ("[source]\nlatency = '1 s'\n" + own[1] + own[2], "storage is missing"),
    ):
        file.write_text(text.format(*devices[:2]))
        with pytest.raises(ConfigError, match=wrong):
            opened(graph, workers, machine=file)
    file.write_text((own[1] + own[2]).format(devices[2], "/job:worker/task:9/device:cpu:0"))
    with pytest.raises(
        MismatchError, match=r"the machine has /job:worker/task:9/device:cpu:0, and the workers"
    ):
        opened(graph, workers, machine=file)


#: The first device has no space for 100 numbers.
MACHINE = """
[source]
read = "1 GB/s"

[[storage]]
name = "staging"
capacity = "1 GiB"
threads = 1
read = "1 GB/s"

[[device]]
name = "{}"
memory = "399 B"

[[device]]
name = "{}"
"""


def test_large_tensors_lie_in_memory_of_both_and_its_blocks_are_used_again() -> None:
    """Two clients, each with workers of its own choice and order; one keeps what it got in a variable."""
    started = {task: new_worker(task) for task in TASKS}
    addresses = {task: each.address for task, each in started.items()}
    graph = Graph()
    x = graph.placeholder("float64", [None], name="x")
    with graph.on_device(TASKS[1]):
        y = graph.add("Neg", x)
    with graph.on_device(TASKS[2]):
        kept = graph.variable("float64", [1 << 16], name="kept")
        keep = graph.add("Assign", kept, y, name="keep")
        total = graph.add("Sum", y, name="total")
    with (
        opened(graph, addresses) as first,
        opened(graph, {task: addresses[task] for task in TASKS[:0:-1]}) as second,
        opened(graph, addresses, shares_memory=False) as apart,
    ):
        for number in range(6):
            assert first.run(total, {x: np.full(1 << 16, float(number))}) == -number << 16
            assert second.run(total, {x: np.full(3, float(number))}) == -3 * number
        assert len(started[TASKS[1]].host._out[addresses[TASKS[2]]]._blocks) == 1
        second.run(keep, {x: np.arange(1.0 * (1 << 16))})
        assert first.run(total, {x: np.ones(1 << 16)}) == -(1 << 16)
        assert np.array_equal(second.run(kept), -np.arange(1 << 16))
        assert len(started[TASKS[1]].host._out[addresses[TASKS[2]]]._blocks) == 2
        assert apart.run(total, {x: np.ones(1 << 16)}) == -(1 << 16)
        assert len(started[TASKS[1]].host._out[addresses[TASKS[2]]]._blocks) == 2
        assert apart.run(total, {x: np.zeros(0)}) == 0
    for each in started.values():
        each.close()


def test_a_kernel_writes_what_is_sent_alone_where_its_receiver_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stays on the sender, too, or goes to two workers, is copied; what a failed step wrote is free again."""
    lent: list[int] = []
    lend, pack = HostLink.lend, ValuesPacker.packed

    def counted(link: HostLink, address: str, nbytes: int) -> Any:
        if (found := lend(link, address, nbytes)) is not None:
            lent.append(nbytes)
        return found

    def fail_to_pack(packer: ValuesPacker, step: int, values: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(HostLink, "lend", counted)
    graph = Graph()
    x = graph.placeholder("float32", [192, None], name="x")
    with graph.on_device(TASKS[1]):
        many = graph.add("aten.view.default", x, args=[{"input": 0}, [4, 48, -1]])
        across = graph.add("aten.transpose.int", many, args=[{"input": 0}, 1, 2])
        sent = [-x, x + x, x / (x + 3), graph.add("ReLU", x), x @ x, many @ across, x > x - x, -(x - 1)]
        turned = -graph.add("aten.t.default", x)  # it lies in memory as what it is made of
        stays, goes_twice = x * x, x - 5
        own = graph.variable("float32", [192, 192], name="own")
        set_own = graph.add("Assign", own, stays)
        add_own = graph.add("AssignAdd", own, stays, controls=[set_own.endpoint.node])
    with graph.on_device(TASKS[2]):
        theirs = graph.variable("float32", [192, 192], name="theirs")
        set_theirs = graph.add("Assign", theirs, sent[0])
        add_theirs = graph.add("AssignAdd", theirs, x, controls=[set_theirs.endpoint.node])
        received = [graph.add("Identity", each) for each in (*sent[1:], turned, stays, goes_twice)]
    with graph.on_device(TASKS[0]):
        received.append(graph.add("Identity", goes_twice))
    fetches = [*received, add_own, add_theirs]
    started = {task: new_worker(task) for task in TASKS}
    addresses = {task: each.address for task, each in started.items()}
    stack = contextlib.ExitStack()
    for each in started.values():
        stack.enter_context(contextlib.closing(each))

    def in_use() -> int:
        return sum(int(view[0]) for view in started[TASKS[1]].host._out[addresses[TASKS[2]]]._views)

    with stack, opened(graph, addresses) as parted, Session(graph) as whole:
        for number in range(3):
            feeds = {x: np.random.default_rng(number).normal(size=(192, 192)).astype(np.float32)}
            for one, other in zip(parted.run(fetches, feeds), whole.run(fetches, feeds), strict=True):
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)
            assert len(lent) == number * len(
                sent
            )  # in the first step it has to be seen what shapes there are
        assert set(lent) == {4 * 192 * 192, 4 * 4 * 48 * 48, 192 * 192}
        wait_until(lambda: in_use() == 1)  # by the variable
        monkeypatch.setattr(ValuesPacker, "packed", fail_to_pack)
        with pytest.raises(KernelError, match="Send raised OSError"):
            parted.run(fetches, feeds)
        monkeypatch.setattr(ValuesPacker, "packed", pack)
        wait_until(lambda: in_use() == 1)
        assert np.array_equal(parted.run(fetches, feeds)[-1], whole.run(fetches, feeds)[-1])


def test_memory_that_was_lent_is_handed_over_as_it_is() -> None:
    received: WakingQueue[list[Any]] = WakingQueue()
    there = HostLink(SECRET, "there", received.put)
    here = HostLink(SECRET, "here", lambda parts: None)
    here.connect(["there"])
    assert here.lend("there", 1 << 10) is None  # small messages go by no block
    lent = here.lend("there", 1 << 20)
    assert lent is not None
    assert here.send("there", [lent.data])
    (part,) = there.get_within(received, None)
    lent[:] = 7
    assert np.array_equal(part, lent)
    for link in (here, there):
        link.close()


def test_a_thread_that_waits_receives_itself_and_hears_of_what_others_put() -> None:
    received: WakingQueue[threading.Thread | None] = WakingQueue()
    there = HostLink(SECRET, "there", lambda parts: received.put(threading.current_thread()))
    here = HostLink(SECRET, "here", lambda parts: None)
    here.connect(["there"])
    skipped = []
    for _ in range(6):
        with pytest.raises(Empty):
            there.get_within(received, 1e-9)
        skipped.append(there._skips)
    assert skipped == [1, 0, 3, 2, 1, 0]  # of waits that begin with no look, after looks in vain
    by = None
    while (
        by is not threading.current_thread()
    ):  # what comes before it waits is received by a thread of the link
        sender = threading.Thread(target=here.send, args=("there", [b"some"]))
        sender.start()
        by = there.get_within(received, None)
        sender.join()
    other = threading.Thread(target=lambda: found.append(there.get_within(received, None)))
    found: list[threading.Thread | None] = []
    other.start()
    received.put(None)  # whether it waits already or not
    other.join()
    assert found == [None]
    for link in (here, there):
        link.close()


def test_a_thread_that_slept_receives_all_that_has_come_for_others_too() -> None:
    """As kernels before 5.7 tell nobody else of what came until it ran."""
    received: WakingQueue[threading.Thread] = WakingQueue()
    is_away, gate = threading.Event(), threading.Event()

    def take(parts: list[Any]) -> None:
        if threading.current_thread() is there._thread:
            is_away.set()
            gate.wait()
        else:
            received.put(threading.current_thread())

    there = HostLink(SECRET, "there", take)
    here = HostLink(SECRET, "here", lambda parts: None)
    here.connect(["there"])
    here.send("there", [b"some"])
    is_away.wait()
    for _ in range(3):
        here.send("there", [b"some"])
    there._skips = 1  # no look
    there.get_within(received, None)
    gate.set()
    for link in (here, there):
        link.close()
    assert received.qsize() == 2


def test_who_connected_while_receiving_was_left_to_steps_is_taken_once() -> None:
    """The link's thread hears of a message and of a connection; it takes that while it sees whether steps receive."""
    received: WakingQueue[int] = WakingQueue()
    is_away, gate = threading.Event(), threading.Event()

    def take(parts: list[Any]) -> None:
        received.put(len(parts))
        is_away.set()
        gate.wait()

    there = HostLink(SECRET, "there", take)
    here, late = (HostLink(SECRET, name, lambda parts: None) for name in ("here", "late"))
    here.connect(["there"])
    here.send("there", [b"some"])
    is_away.wait()
    assert there.get_within(received, None) == 1  # a step receives, so that the thread looks whether more do
    with pytest.raises(Empty):
        there.get_within(received, 1e-9)
    here.send("there", [b"some"])
    late.connect(["there"])
    gate.set()
    for link in (late, here, there):
        closing = threading.Thread(target=link.close, daemon=True)
        closing.start()
        closing.join(patient(5))
        assert not closing.is_alive()


class ClosingFirst:
    """The epoll of waiting steps, one of which receives the end of the first connection while that is accepted."""

    def __init__(self, epoll: Any) -> None:
        self._epoll, self._is_first = epoll, True
        self.closed = threading.Event()

    def register(self, connection: socket.socket, mask: int) -> None:
        self._epoll.register(connection, mask)
        if self._is_first:
            self._is_first = False
            connection.close()
            self.closed.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)


def test_who_leaves_at_once_or_sends_nonsense_ends_no_other_connection_and_is_reported_once() -> None:
    received: WakingQueue[bytes] = WakingQueue()
    reported: list[str] = []

    def report(line: str) -> None:
        reported.append(line)
        raise BrokenPipeError("the terminal is gone")

    there = HostLink(SECRET, "there", lambda parts: received.put(bytes(parts[0])), report=report)
    here = HostLink(SECRET, "here", lambda parts: None)
    there._first = closing = ClosingFirst(there._first)  # type: ignore[assignment]
    for message in (b"", b"nonsense", b"nonsense"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(patient(60))
            stranger.connect(there._name("there"))
            if message:
                stranger.send(message)
            assert stranger.recv(1) == b""  # it was cut off
    here.connect(["there"])
    assert here.send("there", [b"some"])
    assert received.get() == b"some"
    assert closing.closed.is_set()
    assert len(reported) == 1
    assert (
        f"process {os.getpid()} of user {os.geteuid()}, at this worker's local socket, was cut off"
        in reported[0]
    )
    for link in (here, there):
        link.close()


def test_batches_that_close_for_long_keep_no_other_client_waiting_and_their_errors_are_reported() -> None:
    closing, gate = threading.Event(), threading.Event()
    reported: list[str] = []

    class Batches(list[Any]):
        def close(self) -> None:
            closing.set()
            gate.wait()
            raise OSError("the disk is gone")

    def made() -> Any:
        return Batches([np.float32(1)])

    worker = Worker(TASKS[0], SECRET, batches={"slow": made}, report=reported.append)
    graph = Graph()
    x = graph.add("NextBatch", batches="slow", outputs=[["float32", []]])
    try:
        with opened(graph, {TASKS[0]: worker.address}) as session:
            assert session.run(x) == 1.0
        closing.wait()
        with opened(graph, {TASKS[0]: worker.address}) as session:
            assert session.run(x) == 1.0
    finally:
        gate.set()
        worker.close()
    said = f"{TASKS[0]}: batches of a session do not close: OSError: the disk is gone"
    assert reported == [said] * 2


def test_a_worker_full_of_steps_that_wait_refuses_one_more_by_name_and_does_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "_MOST_STEPS", 2)
    graph = Graph()
    queue = graph.add("FIFOQueue", capacity=4, components=[["float32", []]])
    graph.add("Enqueue", queue, graph.constant(1.0), name="put")
    got = graph.add("Dequeue", queue, name="got")
    v = graph.variable("float32", [], initial=3.0, name="v")
    init = graph.initialize_all()
    with (
        contextlib.closing(new_worker(TASKS[0])) as worker,
        opened(graph, {TASKS[0]: worker.address}) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        other.run(targets=[init])
        with opened(graph, {TASKS[0]: worker.address}) as full:
            waiting = [threads.submit(full.run, got) for _ in range(2)]
            wait_until(lambda: worker._free_steps._value == 0)
            refused = "task:0 runs 2 steps, as many as a worker can at once: let"
            with pytest.raises(UnsupportedError, match=refused):
                full.run(targets=["put"])
            with pytest.raises(UnsupportedError, match=refused):
                other.run(v)
            assert len(other.state()["resources"]) == 1
            assert not any(each.done() for each in waiting)
        for each in waiting:
            with pytest.raises(CancelledError):
                each.result()
        full._requests.tell(
            TASKS[0], {"kind": "abort"}
        )  # as a run does that ends while the session is closed
        wait_until(lambda: worker._free_steps._value == 2)
        assert other.run(v) == 3


def totals_of_eight(first: str, second: str) -> tuple[Graph, Any, list[Any], Any, dict[str, Any]]:
    """The first worker has all of eight tensors at once; the second needs one after the other.

    Returns: the graph, its placeholder, the eight, their total, and costs by node.
    """
    graph = Graph()
    x = graph.placeholder("float32", [1000], name="x")
    with graph.on_device(first):
        sources = [graph.add("Mul", x, graph.constant(np.float32(k)), name=f"source{k}") for k in range(8)]
    with graph.on_device(second):
        total = graph.add("Neg", sources[0], name="total0")
        for k in range(1, 8):
            total = graph.add("Add", total, sources[k], name=f"total{k}")
    costs = {
        name: {"cost": {f"{task}/device:cpu:0": float("total" in name) for task in TASKS}, "bytes": 4000}
        for name in graph.nodes
    }
    return graph, x, sources, total, costs


def test_a_receiver_asks_for_tensors_as_late_as_it_needs_them(workers: dict[str, str]) -> None:
    graph, x, _, total, costs = totals_of_eight(*TASKS[:2])
    feeds = {x: np.arange(1000, dtype=np.float32)}
    peaks, found = [], []
    for orders in (True, False):
        with opened(graph, workers, costs=costs, orders_receives=orders) as session:
            own = [0]
            # On a busy machine, the first worker may send no sooner than the second needs it.
            while len(own) <= (3 if orders else 100) and (orders or max(own) <= 3 * 4000):
                counted = Statistics()
                found.append(session.run(total, feeds, statistics=counted))
                own.append(counted.received_bytes[TASKS[1]])
            peaks.append(max(own))
    assert peaks[0] <= 3 * 4000 < peaks[1]
    assert all(np.array_equal(each, 28 * feeds[x]) for each in found)


class Waiting:
    """Stands for a node that waits: keeps the values or the error that it was given."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def finish(self, values: Any) -> None:
        self.told.append(values)

    def fail(self, error: BaseException) -> None:
        self.told.append(error)


def test_a_tensor_that_was_asked_for_and_cannot_be_sent_fails_its_step() -> None:
    error, waiter = MismatchError("too large"), Waiting()

    def send(*_: Any) -> None:
        raise error

    mail = Mail(send)
    mail.offer(1, "x", TASKS[1], {}, waiter)
    mail.asked(1, "x", TASKS[1])
    assert waiter.told == [error]


def test_lossy_sends_lose_the_lower_halves_between_workers_alone(workers: dict[str, str]) -> None:
    """The values of section 5.5: what is cut off is filled with zeros, and NaN stays NaN; other types are exact."""
    graph = Graph()
    x, n = graph.placeholder("float32", [3], name="x"), graph.placeholder("float64", [1], name="n")
    with graph.on_device(TASKS[0]):
        here, exact = graph.add("Neg", x), graph.add("Neg", n)
    with graph.on_device(TASKS[1]):
        there, same = graph.add("Neg", here), graph.add("Neg", exact)
    given = np.array([1 / 3, np.nan, -1e30], np.float32)
    kept = (given.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    with opened(graph, workers, is_lossy=True) as session:
        near, far, wide = session.run([here, there, same], {x: given, n: np.array([1 / 3])})
    assert np.array_equal(near, -given, equal_nan=True)
    assert np.array_equal(far, kept, equal_nan=True)
    assert wide[0] == 1 / 3


def test_one_trace_has_all_workers_and_arrows_from_what_is_sent_to_who_waits_for_it(
    workers: dict[str, str], tmp_path: Path
) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [2], name="x")
    with graph.on_device(TASKS[0]):
        here = graph.add("Neg", x, name="here")
        beside = graph.add("Neg", here, name="here/beside")
    with graph.on_device(TASKS[2]):
        there = graph.add("Add", graph.add("Exp", here, name="apart"), beside, name="there")
    with opened(graph, workers, regions=False, trace=tmp_path / "run.trace") as session:
        for _ in range(2):
            session.run(there, {x: [1, 2]})
    trace = read_trace(tmp_path / "run.trace")
    write_chrome(trace, tmp_path / "run.json")

    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert (processes[0], processes[2]) == (TASKS[0], TASKS[2])
    kernels = [e for e in events if e["ph"] == "X" and e["name"] not in ("wait", "step")]
    assert {(e["name"], e["pid"]) for e in kernels} == {
        ("here", 0),
        ("here/beside", 0),
        (f"here to {TASKS[2]}", 0),
        (f"here/beside to {TASKS[2]}", 0),
        (f"here received from {TASKS[0]}", 2),
        (f"here/beside received from {TASKS[0]}", 2),
        ("apart", 2),
        ("there", 2),
    }
    assert {e["name"] for e in kernels if "cname" in e} == {
        f"{name} received from {TASKS[0]}" for name in ("here", "here/beside")
    }
    tensors = [(e["ph"], e["pid"]) for e in events if e["name"] == "tensor"]
    assert tensors == [("s", 0), ("f", 2)] * 4
    assert trace.is_complete


def test_each_worker_counts_the_tensors_that_it_has_at_a_time(
    workers: dict[str, str], tmp_path: Path
) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [100, 100], name="x")
    with graph.on_device(TASKS[0]):
        here = graph.add("Neg", x)
    with graph.on_device(TASKS[2]):
        there = graph.add("Concat", here, here, here, axis=0)
        graph.add("Sum", there, name="total")
    counted = Statistics()
    with opened(graph, workers, trace=tmp_path / "run.trace", shares_memory=False) as session:
        session.run("total:0", {x: np.ones((100, 100), np.float32)}, statistics=counted)
    assert counted.live_bytes == {TASKS[0]: 2 * 40_000, TASKS[2]: 4 * 40_000}
    found = {each.task: each.live_bytes for each in explain_graph(read_trace(tmp_path / "run.trace")).workers}
    assert found == {**counted.live_bytes, TASKS[1]: 0}


def test_a_session_places_by_the_trace_of_an_earlier_one(workers: dict[str, str], tmp_path: Path) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [2], name="x")
    graph.add("Exp", graph.add("Neg", x, name="y"), name="z", device=TASKS[1])
    path = tmp_path / "run.trace"
    with opened(graph, workers, trace=path) as session:
        session.run("z:0", {x: [1, 2]})
    with opened(graph, workers, costs=path) as session:
        assert session.placement().reason["y"].endswith("(cost measured)")
        assert session.run("z:0", {x: [0, 0]}).tolist() == [1, 1]
    with pytest.raises(MismatchError, match="another graph"):
        opened(Graph([node("n", "NoOp")]), workers, costs=path)


def test_a_trace_of_workers_that_misses_spans_is_not_complete(
    workers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_MOST_SPANS", 16)
    graph = Graph()
    x = graph.constant(1.0)
    few, many = x, x
    for number in range(20):
        many = graph.add("Neg", many, name=f"n{number}")
    found = []
    for fetches in ([few], [few, many], [many, few]):
        with opened(graph, workers, regions=False, trace=tmp_path / "run.trace") as session:
            for fetched in fetches:
                session.run(fetched)
        trace = read_trace(tmp_path / "run.trace")
        found.append((trace.is_complete, sum(trace.spans["kind"] == Kind.NODE)))
    assert [is_complete for is_complete, _ in found] == [True, False, False]
    assert found[1][1] < 21


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_trace_has_the_spans_of_a_step_that_fails_and_is_not_complete_where_a_worker_is_lost(
    is_lost: bool, workers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker fails after a node of its own, while the second one waits for it."""
    graph = Graph()
    x = graph.placeholder("float32", [], name="x")
    with graph.on_device(TASKS[1]):
        beside = graph.add("Neg", x, name="beside")
    with graph.on_device(TASKS[0]):
        before = graph.add("Neg", beside, name="before")
        bad = graph.add("Call", before, function="fail", outputs=[["float32", []]], name="bad")
    with graph.on_device(TASKS[1]):
        after = graph.add("Add", beside, bad, name="after")
    take = Ask.take

    def take_or_lose(ask: Any, task: str, message: dict[str, Any]) -> None:
        if task == TASKS[1]:
            session._requests._lose(task, "has ended")
        else:
            take(ask, task, message)

    with opened(graph, workers, regions=False, trace=tmp_path / "run.trace") as session:
        session.run([before, beside], {x: 1.0})
        if is_lost:
            monkeypatch.setattr(Ask, "take", take_or_lose)
        with pytest.raises(KernelError, match="the disk is gone"):
            session.run(after, {x: 1.0})
    trace = read_trace(tmp_path / "run.trace")
    nodes = trace.spans[(trace.spans["kind"] == Kind.NODE) & (trace.spans["step"] == 1)]
    names = {(int(span["rank"]), trace.names[int(span["sample"])]) for span in nodes}
    assert (0, "before") in names
    assert ((1, "beside") in names) is not is_lost
    assert trace.is_complete is not is_lost


def test_a_trace_in_which_a_worker_refuses_a_step_is_complete(tmp_path: Path) -> None:
    graph = Graph()
    x = graph.constant(1.0)
    with contextlib.closing(new_worker(TASKS[0])) as worker:
        worker._free_steps = threading.Semaphore(1)
        with opened(graph, {worker.task: worker.address}, trace=tmp_path / "run.trace") as session:
            session.run(x)
            worker._free_steps.acquire()
            with pytest.raises(UnsupportedError, match="as many as a worker can at once"):
                session.run(x)
    assert read_trace(tmp_path / "run.trace").is_complete


class Counting:
    """A proxy that counts the bytes of each of its connections, both ways; a client's is the first.

    most: of its connections; who connects then is cut off at once.
    """

    def __init__(self, address: str, most: float = math.inf) -> None:
        self.nbytes: list[int] = []
        self.most = most
        self._to = (address.split(":")[1].strip("/"), int(address.rpartition(":")[2]))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                if len(self.nbytes) >= self.most:
                    here.close()
                    continue
                there = socket.create_connection(self._to)
                self._open += [here, there]
                self.nbytes.append(0)
                for pair in ((here, there), (there, here)):
                    args = (len(self.nbytes) - 1, *pair)
                    self._threads.append(threading.Thread(target=self._pass_on, args=args))
                    self._threads[-1].start()

    def _pass_on(self, number: int, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.nbytes[number] += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End all connections but the client's, and take no new ones."""
        self.most = len(self.nbytes)
        for each in self._open[2:]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()


def test_no_batch_that_a_worker_reads_passes_through_the_client() -> None:
    """The client reaches the worker by a proxy; 4 MB of batches are read and used, and their sums are fetched."""
    batches = [np.full((1 << 17,), number, np.float64) for number in range(4)]
    worker = Worker(TASKS[0], SECRET, batches={"train": batches})
    proxy = Counting(worker.address)
    graph = Graph()
    x = graph.add("NextBatch", batches="train", outputs=[["float64", [1 << 17]]], name="x")
    total = graph.add("Sum", x)
    with opened(graph, {TASKS[0]: proxy.address}) as session:
        assert [session.run(total) for _ in batches] == [float(number << 17) for number in range(4)]
    worker.close()
    proxy.close()
    assert 0 < sum(proxy.nbytes) < 100_000


def test_pictures_go_from_a_reader_by_a_worker_that_decodes_to_one_that_trains_and_not_by_the_client(
    tmp_path: Path,
) -> None:
    """All reach each other by proxies. 3 pictures of 200 KB are read by one worker, and cropped by another."""
    noise = np.random.default_rng(0).integers(0, 256, (3, 256, 256, 3), np.uint8)
    pictures = [cv2.imencode(".png", each)[1].tobytes() for each in noise]
    write_tfrecords(tmp_path / "pictures", pictures)
    tasks = ["/job:read/task:0", "/job:decode/task:0", "/job:worker/task:0"]
    graph = Graph()
    with graph.on_device(tasks[0]):
        file = graph.add("TFRecords", files=[str(tmp_path / "pictures")], name="file")
    crop = graph.add("DecodeRandomCrop", file, size=[224, 224], name="crop")
    with graph.on_device(tasks[2]):
        total = graph.add("Sum", crop)
    costs = {"crop": {"cost": {f"{task}/device:cpu:0": float(task != tasks[1]) for task in tasks}}}
    workers = [new_worker(task) for task in tasks]
    proxies = [Counting(each.address) for each in workers]
    addresses = {task: proxy.address for task, proxy in zip(tasks, proxies, strict=True)}
    with opened(graph, addresses, costs=costs) as session, Session(graph) as whole:
        assert session.placement().device["crop"] == f"{tasks[1]}/device:cpu:0"
        assert [session.run(total) for _ in pictures] == [whole.run(total) for _ in pictures]
    for worker, proxy in zip(workers, proxies, strict=True):
        worker.close()
        proxy.close()
    reads, decodes, trains = ([each.nbytes[0], sum(each.nbytes[1:])] for each in proxies)
    assert reads[0] + decodes[0] + trains[0] < 100_000
    assert decodes[1] + reads[1] > sum(map(len, pictures))
    assert trains[1] > 3 * 224 * 224 * 3


@pytest.mark.parametrize(
    ("read", "crop"), [("decode", "decode"), ("decode", "worker"), ("worker", "worker"), (None, None)]
)
def test_nodes_read_and_crop_on_a_decode_server_where_the_costs_say_so_and_no_sample_passes_the_client(
    tmp_path: Path, read: str | None, crop: str | None
) -> None:
    """Without costs, reading goes to the one worker that has the data set. All reach each other by proxies."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (3, 256, 256, 3), np.uint8)):
        assert cv2.imwrite(str(tmp_path / "photos" / "a" / f"{number}.png"), pixels)
    device = {job: f"/job:{job}/task:0/device:cpu:0" for job in ("worker", "decode")}
    graph = Graph()
    numbers = graph.placeholder("int64", [3], name="numbers")
    files = graph.add("Call", numbers, function="samples", outputs=[["bytes", [3]]], name="files")
    crops = graph.add("DecodeRandomCrop", files, size=[224, 224], name="crops")
    with graph.on_device("/job:worker"):
        total = graph.add("Sum", crops, axis=[1, 2, 3])
    wanted, costs = {"files": read, "crops": crop}, {}
    if read:
        for name, job in wanted.items():
            cost = {each: float(each != device[job or ""]) for each in device.values()}
            costs[name] = {"cost": cost, "bytes": 1000}
    served = serving(
        ImageFolder(tmp_path / "photos"),
        Address("127.0.0.1", 0),
        key=tmp_path / "key",
        memory_bytes=64 << 20,
        threads=1,
    )
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(contextlib.closing(SampleReader(str(tmp_path / "photos"))))
        made = stack.enter_context(served)
        server = threading.Thread(target=made.server.run)
        server.start()
        stack.callback(server.join)
        stack.callback(made.server.stop)
        of_server = {"samples": SampleReader(made.stored)}
        proxies = {}
        for job, functions in (("worker", {"samples": reader} if read else {}), ("decode", of_server)):
            worker = Worker(f"/job:{job}/task:0", SECRET, functions=functions)
            proxies[worker.task] = Counting(worker.address)
            stack.callback(proxies[worker.task].close)
            stack.callback(worker.close)
        with (
            opened(graph, {task: each.address for task, each in proxies.items()}, costs=costs) as session,
            Session(graph, functions={"samples": reader}) as whole,
        ):
            placed = session.placement()
            found = [
                session.run([total, crops.endpoint.node], {numbers: order})[0]
                for order in ([2, 0, 1], [1, 1, 0])
            ]
            expected = [whole.run(total, {numbers: order}) for order in ([2, 0, 1], [1, 1, 0])]
            with pytest.raises(MismatchError, match=r"node 'files' .*sample 3 is asked for, and .* has 3"):
                session.run(total, {numbers: [0, 3, 1]})
    assert np.array_equal(found, expected)
    assert found[1][0] != found[1][1]  # the same picture, and crops of its own
    if read and crop:
        assert [placed.device[name] for name in wanted] == [device[read], device[crop]]
        assert "finishes at" in placed.reason["files"]
    else:
        assert placed.device["files"] == device["decode"]
        assert placed.reason["files"] == "the only device for it"
    assert sum(each.nbytes[0] for each in proxies.values()) < 100_000
    moved = sum(sum(each.nbytes[1:]) for each in proxies.values())
    assert (
        moved > 2 * 3 * 224 * 224 * 3 or placed.device["crops"] == placed.device["files"] == device["worker"]
    )


def test_pictures_are_decoded_and_cropped_where_the_placement_says_and_are_the_same(
    workers: dict[str, str], tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 10, 3), np.uint8)
    pictures = [cv2.imencode(".png", each[..., ::-1])[1].tobytes() for each in pixels]  # of BGR
    write_tfrecords(tmp_path / "pictures", [*pictures, b"no picture"])
    graph = Graph()
    with graph.on_device(TASKS[0]):
        file = graph.add("TFRecords", files=[str(tmp_path / "pictures")], name="file")
    image = graph.add("DecodeImage", file, size=[8, 10], name="image")
    crop = graph.add("DecodeRandomCrop", file, size=[4, 5], name="crop")
    least = {f"{task}/device:cpu:0": float(task != TASKS[2]) for task in TASKS}
    costs = {name: {"cost": least} for name in ("image", "crop")}
    crops = []
    with opened(graph, workers, costs=costs) as parted, Session(graph) as whole:
        for each in pixels:
            found, expected = parted.run([image, crop]), whole.run([image, crop])
            assert np.array_equal(found[0], each)
            assert np.array_equal(found[1], expected[1])
            crops.append(found[1].tobytes())
        assert parted.placement().device["image"] == f"{TASKS[2]}/device:cpu:0"
        with pytest.raises(KernelError, match=r"node 'image' .*no.* image"):
            parted.run(image)
    assert len(set(crops)) == 3
    for size in ([8], [0, 5], "big"):
        with pytest.raises(MismatchError, match="give height and width"):
            graph.add("DecodeImage", file, size=size)


def run_until_lost(session: WorkerSession, what: Any) -> None:
    """Run until what is lost is noticed."""
    while True:
        session.run(what)


def test_a_lost_worker_is_named_and_all_go_on_from_the_save(tmp_path: Any) -> None:
    graph = Graph()
    with graph.on_device(TASKS[0]):
        w = graph.variable("float32", [], initial=1.0, name="w")
    with graph.on_device(TASKS[1]):
        grow = w * 2.0
    up = graph.add("Assign", w, grow, name="up")
    init = graph.initialize_all()
    first, second = new_worker(TASKS[0]), new_worker(TASKS[1])
    port = int(second.address.rpartition(":")[2])
    with opened(graph, {TASKS[0]: first.address, TASKS[1]: second.address}) as session:
        session.run(init)
        assert session.run(up) == 2.0
        session.save(str(tmp_path))
        assert session.run(up) == 4.0
        second.close()
        named = rf"^(node .*: )?{TASKS[1]} \(process {os.getpid()}, tcp://.* has ended: nobody listens at its"
        with pytest.raises(WorkerLostError, match=named):
            run_until_lost(session, up)
        second = new_worker(TASKS[1], port)
        # All workers go on from the save: 2, and not from what the first one held.
        assert session.run(up) == 4.0
    first.close()
    second.close()


def test_a_loss_is_raised_once_and_no_run_goes_on_before_the_save_is_loaded(
    workers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    with graph.on_device(TASKS[0]):
        w = graph.variable("float32", [], initial=1.0, name="w")
    up = graph.add("Assign", w, w * 2.0, name="up")
    init = graph.initialize_all()
    pretrained, folder = str(tmp_path / "pretrained"), str(tmp_path / "run")

    def fail(path: str) -> Any:
        raise DataError(f"{path} is away")

    with opened(graph, workers) as session:
        session.run(init)
        assert session.run(up) == 2.0
        session.save(pretrained)
        for call in (session.state, lambda: session.restore(pretrained), lambda: session.run(up)):
            assert session.run(up) == 4.0
            session._requests._lose(TASKS[1], "has ended")
            with pytest.raises(WorkerLostError, match=f"{TASKS[1]} .* has ended"):
                call()
        with monkeypatch.context() as patch:
            patch.setattr(client, "read_state", fail)
            with pytest.raises(DataError, match="is away"):
                session.run(up)
        assert session.run(up) == 4.0
        with session.saving(folder, "2 steps") as saves:
            session._requests._lose(TASKS[1], "has ended")
            with pytest.raises(WorkerLostError):
                saves.after(2)
            assert session.run(up) == 4.0  # nothing was saved there yet
        session._requests._lose(TASKS[1], "has ended")
        with session.saving(folder, "2 steps") as saves:
            assert (saves.step, session.run(up)) == (0, 4.0)


def test_a_worker_that_runs_one_node_for_too_long_is_given_up_though_it_answers() -> None:
    gate = threading.Event()
    worker = Worker(TASKS[0], SECRET, functions={"stuck": lambda given: given if gate.wait(600) else None})
    graph = Graph()
    w = graph.variable("float32", [], initial=1.0, name="w")
    stuck = graph.add("Call", graph.add("Read", w), function="stuck", outputs=[["float32", []]], name="stuck")
    init = graph.initialize_all()
    most = {"node_seconds": patient(0.5)}
    with contextlib.closing(worker), opened(graph, {TASKS[0]: worker.address}, **most) as session:

        def train() -> Any:
            session.run(init)
            return session.run(stuck)

        try:
            lost = ""
            while "'stuck' runs for" not in lost:  # on a busy machine others run for long before
                with pytest.raises(WorkerLostError, match=rf"{TASKS[0]} \(process .* lags: ") as caught:
                    train()
                lost = str(caught.value)
        finally:
            gate.set()
        found = None
        while found is None:
            with contextlib.suppress(WorkerLostError):  # a busy machine lags, too
                found = train()
        assert found == 1.0


def test_a_worker_whose_python_answers_no_health_check_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a long call into C: its connection lives. By default it is found within 5 s."""
    monkeypatch.setitem(hosting._ANSWERS, "ping", lambda *_: None)
    graph = Graph()
    queue = graph.add("FIFOQueue", capacity=1, components=[["float32", []]], name="queue")
    got = graph.add("Dequeue", queue, name="got")
    worker = new_worker(TASKS[0])
    with (
        contextlib.closing(worker),
        pytest.raises(WorkerLostError, match=rf"{TASKS[0]} \(process .* lags: Python there answers nothing"),
        opened(graph, {TASKS[0]: worker.address}, lag_seconds=patient(0.3)) as session,
    ):
        run_until_lost(session, got)
    default = SessionConfig().lag_seconds
    assert default is not None
    assert 1.25 * default < 5


def test_a_worker_that_answered_long_before_the_others_is_no_lost_one(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, wait = Requests.ask, Ask.wait

    def wait_long(self: Any, seconds: float | None) -> Any:
        answers = wait(self, seconds)
        if self._requests._name == "":
            self._requests._silence.hear(TASKS[0], -1e9)
        return answers

    def ask_after_ping(self: Any, messages: Any, holds: Any = None) -> Any:
        if self._name:
            self._ping()  # as it may come: with the name of a session that no worker has opened
        return ask(self, messages, holds)

    monkeypatch.setattr(Ask, "wait", wait_long)
    monkeypatch.setattr(Requests, "ask", ask_after_ping)
    graph = Graph()
    two = graph.constant(2.0)
    with opened(graph, workers, lag_seconds=1000.0) as session:
        assert session.run(two) == 2.0


def test_a_worker_that_is_lost_before_its_session_opens_is_named(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Requests.ask

    def ask_and_lose(self: Any, messages: Any, holds: Any = None) -> Any:
        if self._name:
            self._lose(TASKS[1], "has ended")
        return ask(self, messages, holds)

    monkeypatch.setattr(Requests, "ask", ask_and_lose)
    with pytest.raises(WorkerLostError, match=rf"{TASKS[1]} \(process .* has ended"):
        opened(Graph(), workers)


def test_what_a_thread_waits_for_counts_for_that_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailing, "time", SimpleNamespace(perf_counter=iter([1.0, 3.5, 4.0, 4.5]).__next__))
    mail = Mail(lambda *_: None, get_within=lambda queue, seconds: queue.get_nowait())
    queue = WakingQueue[int]()
    queue.put(7)
    assert mail.get_within(queue, 1.0) == 7
    with pytest.raises(Empty):
        mail.get_within(queue, 1.0)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: mail.waited_seconds).result() == 0
    assert mail.waited_seconds == 3.0


def test_tensors_that_wait_from_one_watch_to_the_next_are_counted_once() -> None:
    mail = Mail(lambda *_: None)
    mail.put(1, "early", {0: torch.zeros(2)})
    with mail.watched():
        mail.put(1, "late", {0: torch.zeros(3)})
    for _ in range(2):
        with mail.watched():
            assert mail.peak_bytes == 8 + 12
    mail.end(1)
    with mail.watched():
        assert mail.peak_bytes == 0


def test_a_network_that_is_cut_in_the_middle_of_a_step_ends_it_by_name() -> None:
    began, gate = threading.Event(), threading.Event()

    def wait(given: Any) -> Any:
        began.set()
        gate.wait()
        return given

    worker = Worker(TASKS[0], SECRET, functions={"wait": wait})
    proxy = Counting(worker.address)
    graph = Graph()
    out = graph.add("Call", graph.constant(1.0), function="wait", outputs=[["float32", []]], name="out")

    def cut() -> None:
        began.wait()
        proxy.close()

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        with (
            opened(graph, {TASKS[0]: proxy.address}) as session,
            pytest.raises(WorkerLostError, match=rf"^node 'out' .*{TASKS[0]} \(process"),
        ):
            session.run(out)
    finally:
        began.set()
        gate.set()
        cutting.join()
        worker.close()


@contextlib.contextmanager
def workers_apart(
    most: float, **brought: Any
) -> Iterator[tuple[dict[str, str], tuple[Worker, Worker], Counting]]:
    """Two workers that find no local socket of each other; the second is behind a proxy. brought: by the first."""
    first, second = Worker(TASKS[0], SECRET, functions=brought), new_worker(TASKS[1])
    proxies = Counting(first.address), Counting(second.address, most)
    try:
        addresses = dict(zip(TASKS, [each.address for each in proxies], strict=False))
        yield addresses, (first, second), proxies[1]
    finally:
        for each in (first, second, *proxies):
            each.close()


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_worker_that_another_one_cannot_reach_ends_the_steps_that_need_it_by_name(is_asked: bool) -> None:
    """As behind a firewall, or at an address that is another host for the client than for the worker.

    is_asked: the second one sends, where the first asks.
    """
    graph, x, sources, total, costs = totals_of_eight(*(TASKS[1::-1] if is_asked else TASKS[:2]))
    feeds = {x: np.ones(1000, np.float32)}
    with (
        workers_apart(most=1) as (addresses, workers, proxy),
        opened(graph, addresses, costs=costs if is_asked else None, lost_seconds=patient(1)) as session,
    ):
        assert session.run(sources[0], feeds)[0] == 0.0
        named = f"^{TASKS[0]} cannot reach {TASKS[1]} at {proxy.address}: something else listens.*; give for each "
        for _ in range(2):
            with pytest.raises(WorkerLostError, match=named):
                session.run(total, feeds, timeout_seconds=patient(60))
        assert session.run(sources[0], feeds)[0] == 0.0
        proxy.most = math.inf
        found = None
        while found is None:
            with contextlib.suppress(WorkerLostError):  # on a busy machine the connection takes long
                found = session.run(total, feeds)
        assert np.array_equal(found, 28 * feeds[x])
        assert [len(each._sessions) for each in workers] == [1, 1]


def test_a_link_between_workers_that_is_cut_in_the_middle_of_a_step_ends_it_by_name(tmp_path: Path) -> None:
    began, gate = threading.Event(), threading.Event()

    def wait(given: Any) -> Any:
        began.set()
        gate.wait()
        return given

    graph = Graph()
    with graph.on_device(TASKS[0]):
        sent = graph.add("Call", graph.constant(1.0), function="wait", outputs=[["float32", []]], name="sent")
    with graph.on_device(TASKS[1]):
        w = graph.variable("float32", [], initial=1.0, name="w")
        up = graph.add("AssignAdd", w, sent, name="up")
    init = graph.initialize_all()
    with (
        workers_apart(math.inf, wait=wait) as (addresses, workers, proxy),
        opened(graph, addresses, lost_seconds=patient(1)) as session,
    ):

        def cut() -> None:
            began.wait()
            proxy.cut()
            gate.set()

        session.run(init)
        gate.set()
        assert session.run(up) == 2.0
        session.save(str(tmp_path))
        assert session.run(up) == 3.0
        began.clear()
        gate.clear()
        cutting = threading.Thread(target=cut)
        cutting.start()
        named = rf"^{TASKS[0]} cannot reach {TASKS[1]} at {proxy.address}: the connection was cut; now something else"
        with pytest.raises(WorkerLostError, match=named):
            session.run(up, timeout_seconds=patient(60))
        cutting.join()
        proxy.most = math.inf
        found = None
        while found is None:
            with contextlib.suppress(WorkerLostError):  # on a busy machine the connection takes long
                found = session.run(up)
        assert found == 3.0
        assert [len(each._sessions) for each in workers] == [1, 1]


def test_a_client_that_dies_leaves_nothing_on_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    queue = graph.add("FIFOQueue", capacity=1, components=[["float32", []]], name="queue")
    got = graph.add("Dequeue", queue, name="got")
    worker = new_worker(TASKS[0])
    with contextlib.closing(worker):
        session = opened(graph, {TASKS[0]: worker.address})
        ended: list[BaseException] = []

        def run() -> None:
            with pytest.raises(CancelledError) as caught:
                session.run(got)
            ended.append(caught.value)

        running = threading.Thread(target=run)
        running.start()
        (hosted,) = worker._sessions.values()
        wait_until(lambda: any(step.waiting for each in hosted._sessions() for step in each.steps()))
        monkeypatch.setattr(
            session._requests, "tell", lambda *_: None
        )  # the worker hears of nothing any more
        monkeypatch.setattr(Ask, "settle", lambda ask, seconds: session._requests.forget(ask.number))
        session.close()
        running.join()
        assert len(ended) == 1
        assert worker._sessions
        monkeypatch.setattr(hosting, "FORGOTTEN_SECONDS", -1.0)
        worker._tick()
        assert not worker._sessions
        wait_until(lambda: not any(each.steps() for each in hosted._sessions()))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_lost_within_five_seconds(how: signal.Signals) -> None:
    graph = Graph()
    with graph.on_device(TASKS[0]):
        queue = graph.add("FIFOQueue", capacity=1, components=[["float32", []]], name="queue")
        got = graph.add("Dequeue", queue, name="got")
    with graph.on_device(TASKS[1]):
        far = graph.add("Neg", got, name="far")
    with (
        LocalWorkers(2) as workers,
        WorkerSession(graph, workers.addresses, workers.secret, report=None) as session,
    ):
        threading.Timer(1.0, os.kill, (session.processes[TASKS[1]], how)).start()
        why = (
            "has ended: nobody"
            if how is signal.SIGKILL
            else r"did not answer for \d+\.\d s: its process is there, and"
        )
        with pytest.raises(WorkerLostError, match=rf"node 'far' .*{TASKS[1]} \(process .* {why}"):
            session.run(far, timeout_seconds=1 + patient(5))
        os.kill(session.processes[TASKS[1]], signal.SIGCONT if how is signal.SIGSTOP else 0)


def test_tensors_that_are_too_large_to_be_sent_are_refused_as_such(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [None], name="x")
    with graph.on_device(TASKS[0]):
        total = graph.add("Sum", x, name="total")
        twice = graph.add("Concat", x, x, axis=0, name="twice")
    with graph.on_device(TASKS[1]):
        there = graph.add("Sum", twice, name="there")
    monkeypatch.setattr(wire, "MOST_PART_BYTES", 400)
    with opened(graph, workers, shares_memory=False) as session:
        for fetch, count in ((total, 101), (twice, 100), (there, 100)):
            with pytest.raises(MismatchError, match=r"bytes, and 400 can be sent to or from a worker"):
                session.run(fetch, {x: np.ones(count, np.float32)})
            assert session.run(there, {x: np.ones(50, np.float32)}) == 100


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions look soon why workers do not answer, and as long as a busy machine needs."""
    monkeypatch.setattr(requesting, "_LOOK_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(looking, "LOOK_SECONDS", patient(0.5))


@pytest.mark.usefixtures("looks_soon")
def test_who_has_another_secret_or_other_addresses_reaches_nobody_and_is_told_which_it_is(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, bool | None]] = []

    def has_key(address: str, *rest: Any) -> bool | None:
        tried.append((address, carrier_zmq.has_key(address, *rest)))
        return tried[-1][1]

    monkeypatch.setattr(reaching, "has_key", has_key)
    with pytest.raises(
        MismatchError, match=rf"^the worker at {workers[TASKS[0]]} has another secret than this"
    ):
        WorkerSession(Graph(), workers, os.urandom(32), report=None)
    assert {address for address, _ in tried} == {workers[TASKS[0]]}  # which ends it
    tried.clear()
    swapped = {TASKS[0]: workers[TASKS[1]], TASKS[1]: workers[TASKS[0]]}
    with pytest.raises(
        MismatchError,
        match=rf"^the worker at {workers[TASKS[1]]} is {TASKS[1]}, and {TASKS[0]} was asked for$",
    ):
        opened(Graph(), swapped)
    assert [has for _, has in tried].index(True) == len(tried) - 1


@pytest.mark.usefixtures("looks_soon")
def test_a_session_reports_where_nobody_listens_and_waits_for_who_starts_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        monkeypatch.setattr(requesting, "HELLO_SECONDS", 0.3)
        with pytest.raises(
            WorkerLostError, match=f"{TASKS[0]} at {address}: a process listens that does nothing"
        ):
            opened(Graph(), {TASKS[0]: address})
    with pytest.raises(WorkerLostError, match=f"{TASKS[0]} at {address}: nobody listens; start each worker"):
        opened(Graph(), {TASKS[0]: address})
    monkeypatch.setattr(requesting, "HELLO_SECONDS", 600.0)
    started = []

    def start(line: str) -> None:
        assert f"waits up to 600 s for its workers: {TASKS[0]} at {address}: nobody listens" in line
        started.append(new_worker(TASKS[0], port))

    graph = Graph()
    two = graph.constant(2.0)
    with WorkerSession(graph, {TASKS[0]: address}, SECRET, report=start, lag_seconds=patient(3.5)) as session:
        assert session.run(two) == 2.0
    (worker,) = started
    worker.close()


def test_the_look_for_a_lost_worker_waits_for_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = WakingQueue[str]()

    def look_at(address: str) -> tuple[looking.At, str]:
        looked.put(address)
        return looking.At.NOBODY, ""

    monkeypatch.setattr(looking, "look_at", look_at)
    worker = new_worker(TASKS[0])
    with opened(Graph(), {TASKS[0]: worker.address.replace("127.0.0.1", "localhost")}):
        worker.close()
        assert looked.get() == worker.address


def test_workers_that_are_lost_together_are_looked_at_together(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look may take half a second."""
    together = threading.Barrier(len(TASKS), timeout=patient(5))

    def look_at(address: str) -> tuple[looking.At, str]:
        together.wait()
        return looking.At.SILENT, ""

    monkeypatch.setattr(looking, "look_at", look_at)
    with opened(Graph(), workers) as session:
        session._requests._notice({0, 1, 2})
        with pytest.raises(
            WorkerLostError, match=f"{TASKS[2]} .* did not answer for 3.0 s: its process is there"
        ):
            session.state()
        assert not any(peer.is_here for peer in session._requests.peers.values())


def test_a_client_of_another_version_is_answered(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, told = Requests._take, WakingQueue[dict[str, Any]]()

    def note(self: Any, number: int, who: Any, message: dict[str, Any]) -> None:
        told.put(message)
        take(self, number, who, message)

    monkeypatch.setattr(Requests, "_take", note)
    with opened(Graph(), workers) as session:
        session._requests._link._do(0, lambda carrier: carrier.ask(0, [b"[2,{}]"]))
        while (message := told.get())["kind"] != "failed":
            pass
    assert "of version 2, and this is version 1" in message["error"]["text"]


def test_a_worker_of_another_version_is_named(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def greet(worker: Worker, who: Any, *_: Any) -> None:
        worker.link._do(who, lambda carrier: carrier.answer(who, [b"[2,{}]"]))

    monkeypatch.setitem(hosting._ANSWERS, "hello", greet)
    with pytest.raises(
        WorkerLostError, match=r"/job:worker/task:\d .* of version 2, and this is version 1; the same"
    ):
        opened(Graph(), workers)


@pytest.mark.parametrize("name", ["Penstock", "PyTorch"])
def test_a_worker_with_other_versions_is_refused_with_both(
    workers: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(hosting, "versions_here", lambda: {**versions_here(), name: "0.0.7"})
    own = versions_here()[name]
    with pytest.raises(
        VersionError,
        match=rf"^/job:worker/task:\d has .*{name} 0\.0\.7.*, and this process .*{name} {re.escape(own)}",
    ):
        opened(Graph(), workers)


def test_wrong_arguments_are_refused_before_a_worker_is_asked(workers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="seed given with a SessionConfig, which has all arguments"):
        opened(Graph(), workers, config=SessionConfig(regions=False), seed=1)
    with pytest.raises(MismatchError, match=r"task:0 and /job:worker/task:1 have one address, tcp://"):
        opened(Graph(), {TASKS[0]: workers[TASKS[0]], TASKS[1]: workers[TASKS[0]]})
    with pytest.raises(MismatchError, match="seed is -1; give an integer"):
        SessionConfig(seed=-1)
    for wrong, match in (
        (list(workers.values()), 'workers is .*; give addresses by task: {"/job:worker/task:0": "tcp:'),
        ({TASKS[0]: "tcp://here:99999"}, "'here:99999' is no address of a worker"),
        ({TASKS[0]: "over there"}, "'over there' is no address of a worker"),
        ({TASKS[0]: 7448}, "7448 is no address of a worker"),
        ({"worker 0": workers[TASKS[0]]}, "'worker 0' is no name of a worker: give one such as /job:"),
    ):
        with pytest.raises(ConfigError, match=match):
            opened(Graph(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the secret is no 32 bytes"):
        WorkerSession(Graph(), workers, SECRET[1:])
    with pytest.raises(ConfigError, match=r"port \d+: the port is in use; give another one"):
        new_worker(TASKS[0], int(workers[TASKS[0]].rpartition(":")[2]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lost_seconds", 0),
        ("lost_seconds", math.inf),
        ("lag_seconds", 0.0),
        ("lag_seconds", "4 s"),
        ("node_seconds", -1),
        ("link_latency_seconds", -1e-6),
        ("link_bytes_per_second", 0),
        ("link_bytes_per_second", math.nan),
    ],
)
def test_times_and_rates_that_are_none_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is "):
        SessionConfig(**{field: value})


def test_constraints_that_contradict_each_other_are_refused_by_name(workers: dict[str, str]) -> None:
    graph = Graph()
    with graph.on_device(TASKS[0]):
        w = graph.variable("float32", [], initial=1.0, name="w")
    with graph.on_device(TASKS[1]):
        graph.add("Assign", w, 2.0, name="up")
    with (
        opened(graph, workers) as session,
        pytest.raises(InfeasibleError, match=r"'w' on .*'up' on .*task:1"),
    ):
        session.run("up")
    with graph.on_device("/job:nobody"):
        graph.add("Neg", w, name="nowhere")
    with (
        opened(graph, workers) as session,
        pytest.raises(InfeasibleError, match=r"'nowhere' asks for '/job:nobody', and nobody has that: there"),
    ):
        session.run("nowhere")

    def body(i: Any) -> Any:
        with graph.on_device(TASKS[2]):
            return i + 1

    graph = Graph()
    with graph.on_device(TASKS[0]):
        (out,) = graph.while_loop(lambda i: i < 3, body, [0])
    match = rf"'{TASKS[2]}'; make all of them in one with graph.on_device\('/job:worker/task:\d'\):$"
    with opened(graph, workers) as session, pytest.raises(UnsupportedError, match=match):
        session.run(out)


@pytest.mark.parametrize("kind", ["loop", "condition"])
def test_a_loop_or_condition_over_variables_of_two_workers_is_refused_with_what_to_do(
    kind: str, workers: dict[str, str]
) -> None:
    def built(second: str) -> Graph:
        graph = Graph()
        made = []
        for name, device in (("v", TASKS[0]), ("w", second)):
            with graph.on_device(device):
                made.append(graph.variable("int32", [], initial=0, name=name))

        def add(count: Any) -> Any:
            for variable in made:
                graph.add("AssignAdd", variable, count)
            return count + 1

        if kind == "loop":
            graph.while_loop(lambda i: i < 3, add, [0], name="both")
        else:
            graph.cond(
                graph.constant(True), lambda: add(graph.constant(1)), lambda: graph.constant(0), name="both"
            )
        return graph

    with opened(built(TASKS[1]), workers) as session, pytest.raises(UnsupportedError) as refused:
        session.run("both")
    text = str(refused.value)
    assert text.startswith("node 'both' (")
    assert f"a {kind} runs on one device" in text
    assert text.endswith(
        f"'v' on {TASKS[0]!r}, 'w' on {TASKS[1]!r}; make all of them in one with graph.on_device({TASKS[0]!r}):"
    )
    with opened(built(TASKS[0]), workers) as session:
        session.run(targets=[session.graph.initialize_all()])
        session.run("both")
        assert session.run(["v:0", "w:0"]) == ([3, 3] if kind == "loop" else [1, 1])


def test_control_flow_made_by_hand_over_two_workers_is_refused_with_what_to_do(
    workers: dict[str, str],
) -> None:
    def built(second: str) -> Graph:
        graph = Graph()
        with graph.on_device(TASKS[0]):
            graph.add("Switch", graph.constant(2.0), graph.constant(True), name="way")
        with graph.on_device(second):
            graph.add("Neg", "way:1", name="after")
        return graph

    with opened(built(TASKS[1]), workers) as session, pytest.raises(UnsupportedError) as refused:
        session.run("after")
    assert refused.value.node == "way"
    assert refused.value.text == (
        "Switch made by hand runs on one device, with all that follows from it, and these are on several: "
        f"'way' on {TASKS[0]!r}, 'after' on {TASKS[1]!r}; make all of them in one with graph.on_device({TASKS[0]!r}):"
    )
    with opened(built(TASKS[0]), workers) as session:
        assert session.run("after:0") == -2


def test_a_loop_over_variables_that_two_workers_hold_already_is_refused(workers: dict[str, str]) -> None:
    graph = Graph()
    made = [graph.variable("int32", [], initial=0, name=name) for name in ("v", "w")]
    placed = {"v": f"{TASKS[0]}/device:cpu:0", "w": f"{TASKS[1]}/device:cpu:0"}

    def body(i: Any) -> Any:
        for variable in made:
            graph.add("AssignAdd", variable, 1)
        return i + 1

    graph.while_loop(lambda i: i < 3, body, [0], name="both")
    with pytest.raises(UnsupportedError, match=r"'both'.*'v' on '/job:worker/task:0/device:cpu:0', 'w' on"):
        place_graph(graph, list(placed.values()), fixed=placed)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_what_is_sent_arrives_as_it_was(tree: Any) -> None:
    assert unpacked(packed({"kind": "k", "tree": tree})) == {"kind": "k", "tree": tree}


def test_arrays_arrive_as_they_were_and_no_size_is_believed() -> None:
    sent: list[Any] = [
        torch.tensor(3.5),
        torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
        torch.zeros(0, 2),
        torch.tensor([1 + 2j]).conj(),
        np.array([[True, False]]),
        np.array([b"\xff", b""], object),
    ]
    parts = packed({"kind": "k", "of": sent})
    for one, other in zip(unpacked([bytes(each) for each in parts])["of"], sent, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert np.array_equal(
            np.asarray(one), np.asarray(other.resolve_conj() if hasattr(other, "conj_physical") else other)
        )
    for wrong in (
        [b"nonsense"],
        [b"[2,{}]"],
        [b'[1,{"kind":7}]'],
        [b'[1,{"kind":"k","of":{"$":"tensor","at":1,"shape":[1099511627776],"dtype":"float32"}}]', b"1234"],
        [b'[1,{"kind":"k","of":{"$":"tensor","at":5,"shape":[],"dtype":"float32"}}]', b"1234"],
        [b'[1,{"kind":"k","of":{"$":"array","at":1,"shape":[1],"dtype":"O"}}]', b"12345678"],
        [b'[1,{"kind":"k","of":{"$":"tensor","at":1,"shape":[1],"dtype":"bytes"}}]', b"1234"],
        [b'[1,{"kind":"k","of":{"$":"tensor","at":1,"shape":[-1],"dtype":"float32"}}]', b"1234"],
    ):
        with pytest.raises(CorruptError):
            unpacked(wrong)
    outputs = {0: torch.tensor([1 + 2j]).conj(), 2: torch.arange(6).reshape(2, 3)}
    packer = ValuesPacker("s", "n")
    for step in (7, 8):  # the second has the head of the first
        parts = [memoryview(bytearray(each)) for each in packer.packed(step, outputs)]
        found, slow = unpacked_values(parts), unpacked(parts)
        assert found is not None
        assert (
            found[:3]
            == ("s", step, "n")
            == (slow["session"], int.from_bytes(slow["step"], "little"), slow["node"])
        )
        assert list(found[3]) == list(outputs)
        for values in (found[3], dict(slow["values"])):
            for port, other in outputs.items():
                assert torch.equal(values[port], other.resolve_conj())
        for each in (parts[:-1], [*parts[:2], parts[3], parts[2]]):
            assert unpacked_values(each) is None
            with pytest.raises(CorruptError):
                unpacked(each)


def test_a_step_ends_that_another_worker_gave_up_while_it_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Graph()
    one = graph.constant(1.0)
    session = Session(graph)
    with contextlib.closing(new_worker(TASKS[0])) as worker, contextlib.closing(session):
        hosted = hosting._Hosted(worker, Mail(lambda *message: None), seed=0)
        hosted.parts[1] = Future()
        hosted.parts[1].set_result(hosting._Part(session, []))
        plan = session._plan

        def interrupted(*arguments: Any, **how: Any) -> Any:
            hosted.abort(5, "worker 2 is lost")
            return plan(*arguments, **how)

        monkeypatch.setattr(session, "_plan", interrupted)
        message = {"step": 5, "part": 1, "oldest": 5, "counts": False}

        with pytest.raises(CancelledError, match="worker 2 is lost"):
            hosted.run({**message, "fetches": one, "feeds": {}, "targets": []}, None)
