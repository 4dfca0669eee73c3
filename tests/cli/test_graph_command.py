"""`penstock graph`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.graph import Graph, Session
from penstock.graph.workers import SessionConfig

MACHINE = """
source = {read = "1 MB/s"}
storage = [{name = "staging", capacity = "1 GB", threads = 1, read = "1 GB/s"}]

[[device]]
name = "/job:b/task:17/device:cpu:0"
memory = "1 GB"

[[device]]
name = "/job:b/task:1/device:cpu:0"

[[link]]
between = ["/job:b/task:1/device:cpu:0", "/job:b/task:17/device:cpu:0"]
latency = "7 s"
"""


def test_place_shows_where_each_node_goes_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph()
    x = graph.constant(1.0, name="x")
    graph.add("Neg", x, name="far", device="/job:b/task:1")
    path = tmp_path / "graph.json"
    path.write_text(graph.to_json())
    devices = ["--device", "/job:b/task:17/device:cpu:0", "--device", "/job:b/task:1/device:cpu:0"]

    words = ["graph", "place", str(path), *devices, "--latency", "1 s", "--objective", "latency", "--json"]
    assert main(words) == 0

    first, far = json.loads(capsys.readouterr().out)["results"]
    assert (first["node"], first["device"]) == ("x", "/job:b/task:17/device:cpu:0")
    assert far["device"] == "/job:b/task:1/device:cpu:0"
    assert far["finish_seconds"] == pytest.approx(1.0, abs=1e-6)
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    words = ["graph", "place", str(path), "--machine", str(machine), "--json", "--objective"]
    for objective, seconds in (("latency", 7.0), ("throughput", 0.0)):  # the constant goes with its user
        assert main([*words, objective]) == 0
        ends = json.loads(capsys.readouterr().out)["results"][1]["finish_seconds"]
        assert ends == pytest.approx(seconds, abs=1e-6)
    assert main([*words, "speed"]) == 1
    assert "objective is 'speed'; give one of latency, search, throughput" in capsys.readouterr().err
    assert main(["graph", "place", str(path)]) == 1
    assert "--machine" in capsys.readouterr().err
    assert main(["graph", "place", str(path), "--device", "cpu:0"]) == 1
    assert "node 'far'" in capsys.readouterr().err
    assert main(["graph", "place", str(path), "--device", "gpu0"]) == 1
    assert "--device 'gpu0' is no name of a device: give one such as gpu:0" in capsys.readouterr().err
    text = json.loads(graph.to_json())
    text["nodes"][0]["cost"] = {"gpu0": 1.0, "/job:b/task:1/device:cpu:0": 1.0}
    path.write_text(json.dumps(text))
    machine.write_text(MACHINE.replace("/job:b/task:17/device:cpu:0", "slow"))
    named = ["graph", "place", str(path), "--machine", str(machine), "--device", "/job:b/task:1/device:cpu:0"]
    for name in ("gpu0", "slow"):  # of a node's costs, and of the machine
        assert main([*named, "--device", name]) == 0
    path.write_bytes(b"\xf4 no text")
    assert main(named) == 1
    assert f"{path} is not text in UTF-8" in capsys.readouterr().err


def test_place_shows_the_placement_that_a_session_would_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = Graph()
    a, b = "/job:x/task:0/device:cpu:0", "/job:x/task:1/device:cpu:0"
    previous: list[Any] = [graph.constant([1.0], name="x")]
    for name, cost in (("first", {a: 1.0, b: 1.5}), ("second", {a: 9.0, b: 1.0})):
        graph.add("Concat", *previous, name=name, axis=0)
        graph.nodes[name].placement["cost"] = cost
        previous = [f"{name}:0"]
    path = tmp_path / "graph.json"
    path.write_text(graph.to_json())
    words = ["graph", "place", str(path), "--device", a, "--device", b, "--latency", "5 s", "--json"]
    ends = {}
    for objective in ([], ["--objective", SessionConfig().objective], ["--objective", "latency"]):
        assert main([*words, *objective]) == 0
        found = json.loads(capsys.readouterr().out)
        ends[" ".join(objective)] = max(each["finish_seconds"] for each in found["results"])
        assert found["step_seconds"] == ends[" ".join(objective)]
    assert ends == pytest.approx({"": 2.5, "--objective search": 2.5, "--objective latency": 7.0})
    assert found["devices"] == [
        {"device": a, "nodes": 2, "busy_seconds": 1.0},
        {"device": b, "nodes": 1, "busy_seconds": 1.0},
    ]
    assert main(words[:-1]) == 0
    said = capsys.readouterr().out
    assert (
        f"A step ends at 2.5 s: {a} has 0 nodes and is busy for 0 s; {b} has 3 nodes and is busy for 2.5 s."
        in said
    )


def test_place_refuses_a_device_without_space_for_what_lives_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A feed of 40 kB and a tensor of 40 kB beside a variable of 40 kB, whose value and views take nothing more."""
    graph = Graph()
    x = graph.placeholder("float32", [100, 100], name="x")
    read = graph.add("Read", graph.variable("float32", [100, 100], name="w"))
    graph.add("Sum", graph.add("Add", x, graph.add("Identity", read), name="y"))
    path, machine = tmp_path / "graph.json", tmp_path / "machine.toml"
    path.write_text(graph.to_json())
    words = ["graph", "place", str(path), "--machine", str(machine)]
    for memory, code in (("120 kB", 0), ("119 kB", 1)):
        machine.write_text(f'[[device]]\nname = "/job:w/task:0/device:cpu:0"\nmemory = "{memory}"\n')
        assert main(words) == code
    said = capsys.readouterr().err
    assert "node 'y'" in said
    assert (
        "/job:w/task:0/device:cpu:0 needs 120,000 bytes when it runs, 40,000 of variables and 80,000 of tensors that "
        "live at once, and has 119,000" in said
    )


def test_place_goes_by_what_was_recorded_or_printed_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = Graph()
    x = graph.placeholder("float32", [2, 2], name="x")
    graph.add("Neg", x, name="y")
    graph.add("Exp", x, name="other")
    path, trace, printed = (tmp_path / name for name in ("graph.json", "run.trace", "placed.json"))
    path.write_text(graph.to_json())
    with Session(graph, trace=trace) as session:
        session.run("y:0", {x: np.eye(2, dtype=np.float32)})
    machine = tmp_path / "machine.toml"
    machine.write_text(HEAVY)
    words = ["graph", "place", str(path), "--machine", str(machine), "--json", "--costs"]
    costs = []
    for file in (trace, printed):
        assert main([*words, str(file)]) == 0
        printed.write_text(capsys.readouterr().out)
        found = {each["node"]: each for each in json.loads(printed.read_text())["results"]}
        costs.append(found["y"]["cost_seconds"])
        assert (found["y"]["cost_from"], found["y"]["bytes"]) == ("measured", 16)
        assert found["y"]["reason"].endswith("(cost measured)")
        assert (found["x"]["cost_from"], found["other"]["cost_from"]) == ("estimated", "estimated")
        assert (found["y"]["measured_on"], found["other"]["measured_on"]) == (["cpu:0"], None)
    assert costs[0] == costs[1]
    assert len(costs[0]) > 1
    assert main(["graph", "place", str(path), "--device", "cpu:0", "--json"]) == 0
    found = {each["node"]: each for each in json.loads(capsys.readouterr().out)["results"]}
    assert (found["y"]["cost_from"], found["y"]["cost_seconds"]) == ("default", {"cpu:0": 0})
    path.write_text(Graph([{"name": "z", "op": "NoOp"}]).to_json())
    assert main([*words, str(trace)]) == 1
    assert "run.trace: it is of another graph: it has 'y', and this one has not" in capsys.readouterr().err


def test_place_prints_short_times_with_their_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = Graph()
    graph.constant(1.0, name="x")
    path = tmp_path / "graph.json"
    text = json.loads(graph.to_json())
    text["nodes"][0]["cost"] = {"cpu:0": 5e-5, "gpu:0": 0.25}
    path.write_text(json.dumps(text))

    assert main(["graph", "place", str(path), "--device", "gpu:0", "--device", "cpu:0"]) == 0

    said = capsys.readouterr().out
    assert "1 node of " in said
    assert "50 us" in said
    assert "finishes at 50 us, against 250 ms on gpu:0 (cost given)" in said


#: It has no store and no storage: a placement needs devices and links alone.
HEAVY = """
network = "10 GB/s"

[[device]]
name = "/job:w/task:0/device:cpu:0"
flops = "20 GFLOP/s"

[[device]]
name = "/job:w/task:1/device:cpu:0"
flops = "10 TFLOP/s"
memory_rate = "1 TB/s"
"""


def test_place_puts_the_heavy_half_of_a_model_on_the_fast_device_before_anything_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The light half stays where its variable is; a cost that was given or measured counts more than an estimate."""
    slow, fast = "/job:w/task:0/device:cpu:0", "/job:w/task:1/device:cpu:0"
    graph = Graph()
    x = graph.placeholder("float32", [None, 256], name="x")
    graph.add("Neg", graph.add("Square", x, name="light"), device="/task:0")
    y = x
    for number in range(4):
        y = graph.add("MatMul", y, np.eye(256, dtype=np.float32), name=f"heavy{number}")
    path, machine = tmp_path / "graph.json", tmp_path / "machine.toml"
    machine.write_text(HEAVY)

    def placed() -> dict[str, Any]:
        path.write_text(graph.to_json())
        assert main(["graph", "place", str(path), "--machine", str(machine), "--json"]) == 0
        return {each["node"]: each for each in json.loads(capsys.readouterr().out)["results"]}

    found = placed()
    assert found["light"]["device"] == slow
    assert {each["device"] for each in found.values() if each["node"].startswith("heavy")} == {fast}
    # 2 x 32 x 256 x 256 operations; x, the matrix and the result are read and written.
    assert found["heavy0"]["reason"].endswith(
        "(cost estimated: 4.19 MFLOP, 328 kB, an open size counts as 32)"
    )
    for node in graph.nodes.values():
        if node.op == "MatMul":
            node.placement["cost"] = {slow: 1e-6, fast: 1.0}
    found = placed()
    assert found["heavy0"]["device"] == slow
    assert found["heavy0"]["reason"].endswith("(cost given)")


def test_the_machine_with_devices_of_the_reference_page_places_a_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/machine.md").read_text()
    (example,) = (each for each in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[[device]]" in each)
    graph, path, machine = Graph(), tmp_path / "model.json", tmp_path / "machine.toml"
    graph.add("Neg", graph.constant(1.0, name="x"), name="y")
    path.write_text(graph.to_json())
    machine.write_text(example)

    assert main(["graph", "place", str(path), "--machine", str(machine)]) == 0

    assert "/job:worker/task:1/device:cpu:0 has 0 nodes and is busy for 0 s." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--graph-listen 127.0.0.1", "--graph-listen is for nodes of graphs: give the name of this worker"),
        ("--graph-key own", "--graph-key is for nodes of graphs"),
        ("--module os", "--module is for nodes of graphs"),
        ("--task foo", "--task 'foo' is no name of a worker"),
        ("--task /job:a/task:0 --graph-listen a:b", "'a:b' is no address of a worker"),
        ("--task /job:a/task:0 --graph-key key", "who has the graph's may read and write any file"),
        ("--task /job:a/task:0 --key same --graph-key copy", "the trainings have the same in same"),
    ],
)
def test_a_decode_server_refuses_what_is_wrong_about_its_worker_before_it_makes_a_key(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_DECODE_KEY", "key")
    for name in ("same", "copy"):
        path = Path(name)
        path.write_text(f"{bytes(32).hex()}\n")
        path.chmod(0o600)
    assert main(["decode-server", "photos", *words.split()]) == 1
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "same"]
