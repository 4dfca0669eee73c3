"""The steps of a graph on workers are explained by who held them up, not by who waited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.spans import spans_of

from penstock.cli.main import main
from penstock.measure.chains import largest_waits, longest_chain
from penstock.measure.graph_steps import Doing, HeldBy, explain_graph, steps_of
from penstock.measure.plot_graph import draw_graph
from penstock.measure.report import report_of
from penstock.trace import JSON, NO_FLOW, NO_PEER, NO_PLACE, NO_SAMPLE, NO_STEP, Kind, Trace, TraceWriter

TASKS = {rank: f"/job:worker/task:{rank}" for rank in range(3)}
NAMES = {
    0: "load",
    1: "load to /job:worker/task:1",
    2: "train",
    3: "train to /job:worker/task:0",
    4: "end",
    5: "queue",
}
META = {"graph": True, "ranks": 3}


def row(
    kind: Kind,
    rank: int,
    start: float,
    end: float,
    node: int = NO_SAMPLE,
    *,
    peer: int = NO_PEER,
    flow: int = NO_FLOW,
    nbytes: int = 0,
) -> tuple[object, ...]:
    """Return a span of step 0; a wait after the first of its step has no step."""
    step = NO_STEP if kind == Kind.WAIT and start > 0 else 0
    return start, end, node, nbytes, 0, step, kind, NO_PLACE, 0, rank, 1, peer, flow


#: Worker 0 loads for a second and sends that; 1 computes for 6, after 0 and before it, which ends the step. Worker 2
#: is at work of its own for 5, longer than anything but worker 1, and nobody waits for it.
SPANS = [
    row(Kind.STEP, 0, 0.0, 2.0),
    row(Kind.NODE, 0, 0.0, 1.0, 0),
    row(Kind.NODE, 0, 1.0, 2.0, 1, flow=7),
    row(Kind.WAIT, 0, 2.0, 9.0),
    row(Kind.NODE, 0, 2.0, 9.0, 2, peer=1, flow=8),
    row(Kind.STEP, 0, 9.0, 10.0),
    row(Kind.NODE, 0, 9.0, 10.0, 4),
    row(Kind.WAIT, 1, 0.0, 2.0),
    row(Kind.NODE, 1, 0.0, 2.0, 0, peer=0, flow=7),
    row(Kind.STEP, 1, 2.0, 8.5, nbytes=3_000_000),
    row(Kind.NODE, 1, 2.0, 8.0, 2),
    row(Kind.NODE, 1, 8.0, 8.5, 3, flow=8),
    row(Kind.STEP, 2, 0.0, 5.0),
    row(Kind.NODE, 2, 0.0, 5.0, 5),
]


def traced(rows: list[tuple[object, ...]]) -> Trace:
    return Trace(spans_of(rows), META, names=NAMES, hosts=TASKS)


def test_a_step_waited_for_the_worker_that_computed_while_others_waited() -> None:
    found = explain_graph(traced(SPANS))

    assert found.verdict == (
        "1 step took 10 s; for 6.5 s of it (65.0 %) they waited for /job:worker/task:1: computing 60.0 %, waiting for "
        "tensors from /job:worker/task:0 20.0 %, sending 5.0 %."
    )
    assert [(each.task, each.held_seconds) for each in found.workers] == [
        (TASKS[1], 6.5),
        (TASKS[0], 3.0),
        (TASKS[2], 0.0),
    ]
    assert found.workers[1].doing == {Doing.COMPUTING: 2.0, Doing.SENDING: 1.0, Doing.RECEIVING: 7.0}
    assert found.workers[1].received == {TASKS[1]: 7.0}
    assert found.links == {(TASKS[1], TASKS[0]): 0.5}
    assert found.nodes[:2] == (HeldBy("train", TASKS[1], 6.0, 1), HeldBy("load", TASKS[0], 1.0, 1))
    assert (found.slowest[0].task, found.slowest[0].node) == (TASKS[1], "train")


def test_a_tensor_that_was_sent_before_its_receiver_waited_took_its_time_on_the_way() -> None:
    slow = [
        row(Kind.STEP, 0, 0.0, 2.0),
        row(Kind.NODE, 0, 0.0, 1.0, 0),
        row(Kind.NODE, 0, 1.0, 2.0, 1, flow=7),
        row(Kind.STEP, 1, 0.0, 1.5),
        row(Kind.NODE, 1, 0.0, 1.5, 5),
        row(Kind.WAIT, 1, 1.5, 9.0),
        row(Kind.NODE, 1, 1.5, 9.0, 0, peer=0, flow=7),
        row(Kind.STEP, 1, 9.0, 10.0),
        row(Kind.NODE, 1, 9.0, 10.0, 2),
    ]

    found = explain_graph(traced(slow))

    assert found.slow_link == (TASKS[0], TASKS[1])
    assert found.links == {(TASKS[0], TASKS[1]): 7.5}
    assert "for 7.5 s of it (75.0 %) they waited for tensors on their way from" in found.verdict
    assert "is_lossy=True" in found.advice


def test_the_first_step_of_its_fetches_counts_apart_from_those_that_follow() -> None:
    """One that initialises and one that loads take long before their nodes; then, nodes take most of each step."""
    rows: list[tuple[object, ...]] = []
    at = 0.0
    for step, (node, before, computing) in enumerate(
        [(4, 5, 1), (0, 20, 1), (0, 1, 3), (0, 1, 3), (0, 1, 7)]
    ):
        end = at + before + computing
        for kind, start, number in ((Kind.STEP, at, NO_SAMPLE), (Kind.NODE, at + before, node)):
            span = list(row(kind, 0, start, end, number))
            span[5] = step
            rows.append(tuple(span))
        at = end + 1.0

    found = explain_graph(traced(rows))

    assert (found.steps, found.seconds, found.median_seconds) == (3, 16.0, 4.0)
    assert (found.first_steps, found.first_seconds) == (2, 27.0)
    assert found.verdict.startswith("3 steps took 16 s, 4 s each at the median; for 16 s of it")
    assert "computing 81.2 %, between nodes 18.8 %. " in found.verdict
    assert found.verdict.endswith(
        " The first steps of 2 different fetches took 27 s before, and count apart."
    )
    assert (found.slowest[0].step, found.slowest[0].seconds) == (1, 21.0)
    assert draw_graph(traced(rows)).axes


def test_a_wait_for_a_queue_is_of_the_worker_that_has_it() -> None:
    waiting = [
        row(Kind.STEP, 0, 0.0, 1.0),
        row(Kind.WAIT, 0, 1.0, 4.0),
        row(Kind.NODE, 0, 0.5, 4.25, 5),
        row(Kind.STEP, 0, 4.0, 5.0),
    ]

    (step,) = steps_of(traced(waiting))

    assert [(each.doing, each.node, each.seconds) for each in step.path] == [
        (Doing.BETWEEN, NO_SAMPLE, 0.5),
        (Doing.COMPUTING, 5, 0.5),
        (Doing.WAITING, 5, 3.0),
        (Doing.COMPUTING, 5, 0.25),
        (Doing.BETWEEN, NO_SAMPLE, 0.75),
    ]
    assert "waiting for a queue, a mutex or a batch 60.0 %" in explain_graph(traced(waiting)).verdict


def test_the_longest_chain_leads_from_worker_to_worker_and_waits_name_their_tensors() -> None:
    chain, waits = longest_chain(traced(SPANS)), largest_waits(traced(SPANS), 1)

    assert chain is not None
    assert [(link.what, link.seconds) for link in chain.links] == [
        ("load on /job:worker/task:0", 1.0),
        ("load to /job:worker/task:1 on /job:worker/task:0", 1.0),
        ("train on /job:worker/task:1", 6.0),
        ("train to /job:worker/task:0 on /job:worker/task:1", 0.5),
        ("tensor train from /job:worker/task:1 on /job:worker/task:0", 0.5),
        ("end on /job:worker/task:0", 1.0),
    ]
    assert [(each.rank, each.seconds, str(each)) for each in waits] == [
        (0, 7.0, "tensor train from /job:worker/task:1 7 s")
    ]


def test_of_a_trace_in_which_no_step_has_ended_that_is_all_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = "No step of the graph has ended."
    report = report_of(traced([]))
    assert (report.verdict, report.sections, report.notes) == (nothing, [], [])
    assert longest_chain(traced([])) is None
    with TraceWriter(tmp_path / "run.trace", {"graph": True, "host": "box", "rank": 0}):
        pass
    assert main(["explain", str(tmp_path / "run.trace")]) == 0
    assert capsys.readouterr().out == f"{nothing}\n"


@pytest.mark.usefixtures("fonts")
def test_all_commands_speak_of_a_session_on_one_process_as_of_a_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture, page = (tmp_path / name for name in ("run.trace", "run.svg", "run.html"))
    with TraceWriter(path, {"graph": True, "host": "box", "rank": 0}) as writer:
        writer.append(
            spans_of(
                [
                    row(Kind.STEP, 0, 0.0, 1.0),
                    row(Kind.NODE, 0, 0.0, 1.0, 0),
                    row(Kind.WAIT, 0, 1.0, 4.0),
                    row(Kind.NODE, 0, 1.0, 4.0, 5),
                    row(Kind.STEP, 0, 4.0, 5.0),
                    row(Kind.NODE, 0, 4.0, 5.0, 2),
                    row(Kind.SAVE, 0, 5.0, 6.0),
                ]
            )
        )
        writer.name(NAMES)
    said = []
    for words in (
        ["explain", path],
        ["trace", path, "--waits", "--stages", "--plot", picture],
        ["report", path, "--out", page],
    ):
        assert main([*map(str, words)]) == 0
        said.append(capsys.readouterr().out)

    for text in (*said, page.read_text()):
        assert "1 step took 5 s: waiting for a queue, a mutex or a batch 60.0 %, computing 40.0 %." in text
        assert not [word for word in ("loader", "decode", "last sample", "unseen", "learn()") if word in text]
    for text in (said[0], page.read_text()):
        assert "waiting in queue took longest: what fills it is slower than the steps" in text
        assert "saves stopped the training for 1 s" in text
    assert "load 1 s" in said[1]
    assert "waiting in queue 3 s" in said[1]
    drawn = picture.read_text()
    assert "What workers did" in drawn
    assert "stall" not in drawn
    assert main(["trace", str(path), "--json"]) == 0
    (epoch,) = json.loads(capsys.readouterr().out)["results"]
    assert epoch["stall_by_cause"] == {
        "waiting for tensors": 0.0,
        "waiting for a queue, a mutex or a batch": 3.0,
    }


@pytest.mark.parametrize("has_saves", [False, True])
def test_all_commands_speak_of_workers_and_nodes(
    has_saves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.trace"
    with TraceWriter(path, META) as writer:
        writer.append(spans_of(SPANS))
        writer.name(NAMES, hosts=TASKS)
    if has_saves:  # as `saving()` leaves them under penstock watch
        meta: dict[str, JSON] = {"snapshots": True, "host": "box", "process": 7, "rank": 0}
        with TraceWriter(tmp_path / "saves.trace", meta) as writer:
            writer.append(spans_of([row(Kind.SAVE, 0, 3.0, 4.0), row(Kind.WRITE, 0, 4.0, 5.0)]))
        path = tmp_path
    said = []
    for words in (
        ["explain", path],
        ["trace", path, "--waits", "--stages"],
        ["report", path, "--out", tmp_path / "run.html"],
    ):
        assert main([*map(str, words)]) == 0
        said.append(capsys.readouterr().out)
    said.append((tmp_path / "run.html").read_text())

    for text in said:
        assert "they waited for /job:worker/task:1: computing 60.0 %" in text
        assert not [word for word in ("loader", "rank 0", "decode", "last sample", "unseen") if word in text]
    assert "live tensors" in said[0]
    assert all("3 MB" in text for text in (said[0], said[-1]))
    titles = [each.title for each in report_of(traced(SPANS)).sections]
    assert titles == [
        "What workers did",
        "What steps waited for longest",
        "The slowest steps",
        "The median step: 0",
        "The longest step: 0",
    ]
    assert main(["explain", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["task"] for each in found["results"]] == [TASKS[1], TASKS[0], TASKS[2]]
    assert found["results"][1]["received_seconds"] == {TASKS[1]: 7.0}
    assert [each["live_bytes"] for each in found["results"]] == [3_000_000, 0, 0]
    assert found["moments"][0]["node"] == "train"
