"""Workers, clients and launchers that are killed or stopped: the lost one is named, a training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.graph.clusters import SECRET, TASKS, Killed, new_worker, opened
from tests.patience import patient, wait_until

from penstock.errors import ConfigError
from penstock.graph import Edge, Graph, Session, WorkerLostError, gradients
from penstock.graph.workers import LocalWorkers, WorkerSession, local
from penstock.graph.workers import worker as hosting

Strike = Callable[[Any], Any]


def dropped_out(graph: Graph, values: Edge) -> Edge:
    """Add a dropout of one half."""
    noise = graph.add("RandomUniform", shape=[8, 6])
    kept: Edge = graph.add("aten.where.self", noise > 0.5, values, values - values)
    return kept


def in_step() -> tuple[Graph, Edge]:
    """Synchronous data parallel: each of two workers has half of a batch, and the first one the weights."""
    graph = Graph()
    x = graph.placeholder("float32", [16, 6], name="x")
    with graph.on_device(TASKS[0]):
        struck = graph.add("Call", x, function="strike", outputs=[["float32", [16, 6]]])
        w = graph.variable("float32", [6, 1], initial=np.full((6, 1), 0.3, np.float32), name="w")
        weights = graph.add("Read", w)
    losses, slopes = [], list[Any]()
    for part in range(2):
        with graph.on_device(TASKS[part]):
            own = graph.add("Slice", struck, begin=[8 * part, 0], size=[8, -1])
            losses.append(graph.add("Sum", graph.add("Square", dropped_out(graph, own) @ weights - 1.0)))
            slopes += gradients(graph, losses[-1], [w])
    with graph.on_device(TASKS[0]):
        train = graph.add("AssignAdd", w, (slopes[0] + slopes[1]) * -0.01)
        loss = graph.add("Add", *losses, controls=[train], name="loss")
    return graph, loss


def in_layers() -> tuple[Graph, Edge]:
    """Model parallel: each of two workers has one layer."""
    graph, random = Graph(), np.random.default_rng(1)
    x = graph.placeholder("float32", [16, 6], name="x")
    layers = []
    for task, size in enumerate((6, 1)):
        with graph.on_device(TASKS[task]):
            initial = random.normal(size=(6, size)).astype(np.float32)
            layers.append(graph.variable("float32", [6, size], initial=initial, name=f"w{task}"))
    with graph.on_device(TASKS[0]):
        struck = graph.add("Call", x, function="strike", outputs=[["float32", [16, 6]]])
        rows = graph.add("Slice", struck, begin=[0, 0], size=[8, -1])
        hidden = dropped_out(graph, graph.add("Sigmoid", rows @ graph.add("Read", layers[0])))
    with graph.on_device(TASKS[1]):
        loss = graph.add("Sum", graph.add("Square", hidden @ graph.add("Read", layers[1]) - 1.0))
    slopes: list[Any] = gradients(graph, loss, layers)
    train = [
        graph.add("AssignAdd", layer, slope * -0.01) for layer, slope in zip(layers, slopes, strict=True)
    ]
    return graph, graph.add("Identity", loss, controls=train, name="result")


def batch_of(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(16, 6)).astype(np.float32)


def train_as_a_client() -> None:
    """Be a client that trains; it goes on after each step when it is told to. `sys.argv`: addresses, folder."""
    graph, loss = in_step()
    init = graph.initialize_all()
    addresses, secret = json.loads(sys.argv[1]), bytes.fromhex(os.environ["SECRET"])
    with (
        WorkerSession(graph, addresses, secret, seed=7, lag_seconds=patient(3.5)) as session,
        session.saving(sys.argv[2], "3 steps") as saves,
    ):
        if not saves.step:
            session.run(init)
        for step in range(saves.step, 12):
            print(step, session.run(loss, {"x:0": batch_of(step)}).tobytes().hex(), flush=True)
            saves.after(step + 1)
            input()


def losses_in_one_process(built: Callable[[], tuple[Graph, Edge]], steps: int) -> list[bytes]:
    graph, loss = built()
    init = graph.initialize_all()
    with Session(graph, seed=7, functions={"strike": lambda given: given}) as session:
        session.run(init)
        return [session.run(loss, {"x:0": batch_of(step)}).tobytes() for step in range(steps)]


@pytest.mark.parametrize(
    ("built", "is_killed"),
    [
        (in_step, False),
        pytest.param(in_step, True, marks=pytest.mark.slow),
        pytest.param(in_layers, True, marks=pytest.mark.slow),
    ],
)
def test_a_training_with_dropout_that_loses_a_worker_in_mid_step_has_the_losses_of_one_that_does_not(
    built: Callable[[], tuple[Graph, Edge]], is_killed: bool, tmp_path: Path
) -> None:
    """The second worker ends in steps 1 and 5, before and after a save; the client is another one from step 8 on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    key = tmp_path / "graph.key"
    key.write_text(SECRET.hex())
    key.chmod(0o600)
    steps, lose_at = 12, [1, 5]

    def start() -> Any:
        return Killed(TASKS[1], port, key) if is_killed else new_worker(TASKS[1], port)

    def strike(given: Any) -> Any:
        if step in lose_at:
            lose_at.remove(step)
            second.close()
        return given

    graph, loss = built()
    init = graph.initialize_all()
    first, second = new_worker(TASKS[0], strike=strike), start()
    addresses = {TASKS[0]: first.address, TASKS[1]: f"tcp://127.0.0.1:{port}"}
    found: dict[int, set[bytes]] = {step: set() for step in range(steps)}
    lost, went_on = [], []
    for end in (8, steps):
        with (
            opened(graph, addresses, seed=7) as session,
            session.saving(str(tmp_path / "run"), "3 steps") as saves,
        ):
            step = saves.step
            went_on.append(step)
            while step < end:
                try:
                    if not step:
                        session.run(init)
                    found[step].add(session.run(loss, {"x:0": batch_of(step)}).tobytes())
                    step += 1
                    saves.after(step)
                except WorkerLostError as error:
                    lost.append((step, TASKS[1] in str(error), "go on from saves.step" in str(error)))
                    step = saves.step
                    went_on.append(step)
                    second = start()
    first.close()
    second.close()
    assert lost == [(1, True, True), (5, True, True)]
    assert went_on == [0, 0, 3, 6]
    # What was run twice had the same loss both times.
    assert [found[step] for step in range(steps)] == [{each} for each in losses_in_one_process(built, steps)]
    assert len(set().union(*found.values())) == steps


@pytest.mark.slow
def test_workers_serve_the_next_client_after_one_was_killed_in_mid_step_or_between_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client is there all the time. The training goes on from its last save, with the losses of one process."""
    kill_at = 4

    def strike(given: Any) -> Any:
        if np.array_equal(given, batch_of(kill_at)) and len(clients) == 1:
            clients[0].kill()
            clients[0].wait()
        return given

    first, second = new_worker(TASKS[0], strike=strike), new_worker(TASKS[1])
    workers = {each.task: each.address for each in (first, second)}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("SECRET", SECRET.hex())
    main = f"from {__name__} import train_as_a_client as main; main()"
    words = [sys.executable, "-c", main, json.dumps(workers), str(tmp_path / "run")]
    found: dict[int, set[bytes]] = {step: set() for step in range(12)}
    clients: list[subprocess.Popen[str]] = []
    graph, loss = in_layers()
    init = graph.initialize_all()
    with opened(graph, workers) as other:
        other.run(init)
        for end in (12, 8, 12):
            clients.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            with clients[-1] as client:
                assert client.stdin is not None
                assert client.stdout is not None
                for line in client.stdout:
                    other.run(loss, {"x:0": batch_of(0)})
                    step, value = line.split()
                    found[int(step)].add(bytes.fromhex(value))
                    if int(step) == end - 1:
                        break
                    print(file=client.stdin, flush=True)
                client.kill()
        both = [first, second]
        monkeypatch.setattr(hosting, "FORGOTTEN_SECONDS", patient(5))

        def sessions() -> list[int]:
            for each in both:
                each._tick()
            return [len(each._sessions) for each in both]

        wait_until(lambda: sessions() == [1, 1])
        other.run(loss, {"x:0": batch_of(0)})
        assert [each._free_steps._value for each in both] == [hosting._MOST_STEPS] * 2
    first.close()
    second.close()
    expected = losses_in_one_process(in_step, 12)
    assert [found[step] for step in range(12)] == [{each} for each in expected]


def test_a_message_that_is_too_large_for_a_worker_ends_that_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from who has the secret and another program: the worker cuts the connection before it has the message."""
    with monkeypatch.context() as patch:
        patch.setattr(hosting, "MOST_PART_BYTES", 1 << 16)
        worker = new_worker(TASKS[0])
    graph = Graph()
    x = graph.placeholder("float32", [None], name="x")
    total = graph.add("Sum", x, name="total")
    few, many = np.ones(100, np.float32), np.ones(1 << 20, np.float32)
    workers = {worker.task: worker.address}
    with contextlib.closing(worker), opened(graph, workers) as other, opened(graph, workers) as session:
        for _ in range(2):
            with pytest.raises(WorkerLostError, match=r"^node 'total' .*task:0 \(process .* was cut off"):
                session.run(total, {x: many})
            assert session.run(total, {x: few}) == 100
        assert other.run(total, {x: few}) == 100


@pytest.mark.parametrize(
    ("words", "why"), [(["sleep", "60"], "says nothing for 0.1 s"), (["true"], "ended with 0")]
)
def test_a_worker_of_this_host_that_does_not_start_is_named(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped before it listens."""
    monkeypatch.setattr(local, "start_child", lambda task, _, **pipes: subprocess.Popen(words, **pipes))
    monkeypatch.setattr(local, "_START_SECONDS", 0.1 if "0.1" in why else patient(60))
    monkeypatch.setattr(local, "_END_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=f"^{TASKS[0]} did not start: its process {why}"):
        LocalWorkers(1)
