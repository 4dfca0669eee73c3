"""A wait's chain is what happened to its last sample; a run's chain is the kernels that followed each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.spans import spans_of

from penstock.cli.main import main
from penstock.measure.chains import Link, largest_waits, longest_chain
from penstock.trace import NO_PLACE, NO_SAMPLE, SOURCE, Kind, Trace, TraceWriter

WAITS = spans_of(
    [
        # Step 0: sample 7 came last, from the source; sample 3 was there before.
        (0.0, 1.0, NO_SAMPLE, 0, 0, 0, Kind.SLOT, NO_PLACE, 1, 0),
        (1.0, 2.0, 3, 10, 0, 0, Kind.READ, SOURCE, 2, 0),
        (2.0, 2.5, 3, 0, 0, 0, Kind.DECODE, NO_PLACE, 3, 0),
        (1.0, 5.0, 7, 10, 0, 0, Kind.READ, SOURCE, 4, 0),
        (5.0, 5.5, 7, 0, 0, 0, Kind.DECODE, NO_PLACE, 3, 0),
        (0.5, 5.75, NO_SAMPLE, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 0),
        # Step 1: nothing is known of its samples. Step 2 was not waited for.
        (6.0, 6.5, NO_SAMPLE, 0, 0, 1, Kind.WAIT, NO_PLACE, 0, 0),
        (7.0, 7.0, NO_SAMPLE, 0, 0, 2, Kind.WAIT, NO_PLACE, 0, 0),
    ]
)
NAMES = {7: "b/7.jpg", 0: "load", 1: "matmul", 2: "add", 3: "save"}


def test_the_largest_wait_is_a_chain_from_the_slot_to_the_hand_over() -> None:
    waits = largest_waits(Trace(WAITS, names=NAMES))

    assert [(each.step, each.seconds) for each in waits] == [(0, 5.25), (1, 0.5)]
    assert waits[0].links == (
        Link("slot", 1.0),
        Link("read from the source", 4.0, "b/7.jpg"),
        Link("decode", 0.5),
        Link("hand-over", 0.25),
    )
    assert waits[1].links == ()
    assert len(largest_waits(Trace(WAITS), most=1)) == 1


def test_a_kernels_predecessor_is_the_one_that_ended_last_before_it_began() -> None:
    def node(start: float, end: float, number: int, step: int) -> tuple[object, ...]:
        return (start, end, number, 0, 0, step, Kind.NODE, NO_PLACE, 0, 0)

    spans = spans_of(
        [
            node(0.0, 0.5, 0, 0),
            # load (1 to 2), matmul beside add, save after both and a pause: the chain goes by matmul.
            node(1.0, 2.0, 0, 1),
            node(2.0, 5.0, 1, 1),
            node(2.0, 3.0, 2, 1),
            node(5.5, 6.0, 3, 1),
            (1.0, 6.25, NO_SAMPLE, 0, 0, 1, Kind.STEP, NO_PLACE, 0, 0),
        ]
    )

    chain = longest_chain(Trace(spans, {"graph": True}, names=NAMES))

    assert chain is not None
    assert (chain.step, chain.start_seconds, chain.seconds) == (1, 1.0, 5.25)
    assert [(link.what, link.seconds) for link in chain.links] == [
        ("load", 1.0),
        ("matmul", 3.0),
        ("between nodes", 0.5),
        ("save", 0.5),
        ("between nodes", 0.25),
    ]
    assert longest_chain(Trace(WAITS)) is None


def test_the_trace_command_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TraceWriter(tmp_path / "run.trace", {}) as writer:
        writer.append(WAITS)
        writer.name({7: "b/7.jpg"})

    assert main(["trace", str(tmp_path / "run.trace"), "--waits"]) == 0
    shown = capsys.readouterr().out
    assert main(["trace", str(tmp_path / "run.trace"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)

    assert "slot 1 s > read from the source 4 s (b/7.jpg) > decode 500 ms > hand-over 250 ms" in shown
    assert [link["what"] for link in data["waits"][0]["links"]] == [
        "slot",
        "read from the source",
        "decode",
        "hand-over",
    ]
    assert data["chain"] is None
