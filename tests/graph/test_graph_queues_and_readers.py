"""Queues, mutexes and readers: order, waiting, closing, failing, saving."""

from __future__ import annotations

import _thread
import csv
import errno
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each
from tests.graph.graphs import constant, evaluate, node
from tests.patience import patient

from penstock.errors import ConfigError, DataError
from penstock.graph import Graph, GraphError, Session
from penstock.graph.state import resources
from penstock.graph.state.containers import shared_container
from penstock.graph.state.readers import write_tfrecords

Q = node("q", "FIFOQueue", capacity=3, components=[["int32", []]])
X = node("x", "Placeholder", dtype="int32", shape=[])
COMMON = [
    X,
    node("put", "Enqueue", "q:0 x:0"),
    node("take", "Dequeue", "q:0"),
    node("size", "QueueSize", "q:0"),
    node("close", "QueueClose", "q:0"),
]


def put(session: Session, *numbers: int) -> None:
    for number in numbers:
        session.run("put", {"x": number})


def in_thread(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a run in a thread; what it gives or raises comes into the list."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(run())
        except GraphError as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, results


def wait_until_waiting(session: Session, count: int, thread: threading.Thread) -> None:
    while len(session.waits()) < count:
        thread.join(0.001)


def test_elements_come_out_in_order_and_in_batches() -> None:
    nodes = [Q, *COMMON, node("many", "DequeueMany", "q:0", n=2), node("none", "DequeueMany", "q:0", n=0)]
    with Session(Graph(nodes)) as session:
        put(session, 1, 2, 3)
        assert session.run("size:0") == 3
        assert session.run("size:0").dtype == np.int32
        assert session.run("many:0").tolist() == [1, 2]
        assert session.run("none:0").shape == (0,)
        assert session.run("take:0") == 3


def test_who_asks_for_more_than_fits_gets_it_as_it_comes() -> None:
    nodes = [Q, *COMMON, node("many", "DequeueMany", "q:0", n=5)]
    with Session(Graph(nodes)) as session:
        thread, results = in_thread(lambda: session.run("many:0"))
        put(session, *range(5))
        thread.join()

    assert results[0].tolist() == [0, 1, 2, 3, 4]


def test_a_full_queue_holds_the_enqueue_back_until_there_is_space() -> None:
    with Session(Graph([Q, *COMMON])) as session:
        put(session, 1, 2, 3)
        thread, results = in_thread(lambda: session.run("put", {"x": 4}))
        wait_until_waiting(session, 1, thread)
        assert session.run("size:0") == 3
        assert [int(session.run("take:0")) for _ in range(4)] == [1, 2, 3, 4]
        thread.join()

    assert results == [None]


def test_a_closed_queue_gives_what_it_has_and_takes_nothing() -> None:
    nodes = [Q, *COMMON, node("many", "DequeueMany", "q:0", n=2)]
    with Session(Graph(nodes)) as session:
        put(session, 1, 2, 3)
        waiting, _ = in_thread(lambda: session.run("put", {"x": 4}))
        wait_until_waiting(session, 1, waiting)
        session.run("close")
        session.run("close")
        with pytest.raises(GraphError) as refused:
            put(session, 5)
        assert session.run("many:0").tolist() == [1, 2]
        waiting.join()
        assert session.run("take:0") == 3
        with pytest.raises(GraphError, match="'many'") as drained:
            session.run("many:0")
        assert session.run("take:0") == 4
        thread, results = in_thread(lambda: session.run("take:0"))
        thread.join()

    assert refused.value.kind == "cancelled"
    assert drained.value.kind == results[0].kind == "out_of_range"


@pytest.mark.parametrize("ending", ["failure", "interrupt", "timeout"])
def test_a_step_that_ends_withdraws_what_it_waited_for(ending: str) -> None:
    """Two Dequeues and two Enqueues of it wait, one with a part of its elements in the queue; whatever ends it, later
    elements are nobody's but the next run's, and earlier ones its own.
    """

    def end(value: Any) -> Any:
        if ending == "failure":
            raise ValueError("enough")
        _thread.interrupt_main()
        return value

    nodes = [
        Q,
        *COMMON,
        node("other", "FIFOQueue", capacity=1, components=[["int32", []]]),
        node("fill", "Enqueue", "other:0 x:0"),
        node("more", "Enqueue", "other:0 x:0"),
        node("left", "QueueSize", "other:0"),
        node("small", "FIFOQueue", capacity=2, components=[["int32", []]]),
        constant("three", [1, 2, 3], "int32"),
        node("flood", "EnqueueMany", "small:0 three:0"),
        node("flooded", "QueueSize", "small:0"),
        node("a", "Dequeue", "q:0"),
        node("b", "DequeueMany", "q:0", n=2),
        node("end", "Call", "x:0", function="end", outputs=[["int32", []]]),
    ]
    with Session(Graph(nodes), functions={"end": end}) as session:
        session.run("fill", {"x": 1})
        targets = ["a", "b", "more", "flood", *(["end"] if ending != "timeout" else [])]
        with pytest.raises(KeyboardInterrupt if ending == "interrupt" else Exception) as caught:
            # The call comes last: the others wait by then.
            session.run((), {"x": 2}, [*targets], timeout_seconds=0.01 if ending == "timeout" else None)
        assert type(caught.value).__name__ in ("KernelError", "KeyboardInterrupt", "WaitTimeout")
        assert session.waits() == []
        put(session, 7, 8, 9)

        assert session.run("size:0") == 3
        assert session.run(["left:0", "flooded:0"]) == [1, 0]
        assert session.run("a:0") == 7
        assert session.run("b:0").tolist() == [8, 9]


def test_what_a_failed_step_took_goes_back_in_order() -> None:
    """Also if others have put elements meanwhile; of a loop, what the iterations took that were not over."""

    def end(value: Any) -> Any:
        if bool((value == 3).any()):
            raise ValueError("enough")
        return value

    nodes = [
        Q,
        *COMMON,
        node("one", "Dequeue", "q:0"),
        node("two", "DequeueMany", "q:0", ctrl=["one"], n=2),
        node("end", "Call", "two:0", function="end", outputs=[["int32", [2]]]),
    ]
    graph = Graph(nodes)
    q = graph.edge("q:0")
    last = graph.while_loop(
        lambda i: graph.add("Less", i, graph.constant(9, "int32")),
        lambda i: graph.add("Call", graph.add("Dequeue", q), function="end", outputs=[["int32", []]]),
        [graph.constant(0, "int32")],
        parallel_iterations=1,
    )
    with Session(graph, functions={"end": end}) as session:
        put(session, 1, 2, 3)
        thread, _ = in_thread(lambda: session.run("put", {"x": 4}))
        wait_until_waiting(session, 1, thread)
        with pytest.raises(GraphError, match="'end'"):
            session.run(["one:0", "end:0"])
        thread.join()
        assert session.run("size:0") == 4

        with pytest.raises(GraphError, match="enough"):
            session.run(last)
        assert [int(session.run("take:0")) for _ in range(2)] == [3, 4]


def test_a_shuffling_queue_keeps_enough_to_shuffle_and_follows_its_seed() -> None:
    def drawn(seed: int) -> list[int]:
        queue = node(
            "q", "RandomShuffleQueue", capacity=20, min_after_dequeue=4, seed=seed, components=[["int32", []]]
        )
        with Session(Graph([queue, *COMMON])) as session:
            put(session, *range(20))
            order = [int(session.run("take:0")) for _ in range(16)]
            thread, results = in_thread(lambda: session.run("take:0"))
            wait_until_waiting(session, 1, thread)
            session.run("close")
            thread.join()
            return order + [int(results[0])] + [int(session.run("take:0")) for _ in range(3)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert sorted(drawn(1)) == list(range(20)) != drawn(1)


def test_elements_of_several_components_and_of_bytes() -> None:
    nodes = [
        node(
            "q", "FIFOQueue", capacity=9, components=[["bytes", [2]], {"dtype": "float32", "shape": [None]}]
        ),
        node("s", "Placeholder", dtype="bytes", shape=[2]),
        node("f", "Placeholder", dtype="float32", shape=None),
        node("put", "Enqueue", "q:0 s:0 f:0"),
        node("all", "EnqueueMany", "q:0 ss:0 ff:0"),
        node("ss", "Placeholder", dtype="bytes", shape=[None, 2]),
        node("ff", "Placeholder", dtype="float32", shape=None),
        node("take", "DequeueMany", "q:0", n=2),
    ]
    words = np.array([b"\xff", b""], object)
    with Session(Graph(nodes)) as session:
        session.run("put", {"s": words, "f": np.ones(3, np.float32)})
        session.run("all", {"ss": words[None], "ff": np.zeros((1, 3), np.float32)})
        strings, floats = session.run(["take:0", "take:1"])
        with pytest.raises(GraphError, match="component 1") as caught:
            session.run("put", {"s": words, "f": np.float32(1)})

    assert strings.tolist() == [[b"\xff", b""]] * 2
    assert floats.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert caught.value.kind == "mismatch"


def test_a_mutex_lets_one_step_in_and_a_failed_step_gives_it_back() -> None:
    nodes = [
        node("m", "Mutex"),
        node("lock", "MutexAcquire", "m:0"),
        node("lock2", "MutexAcquire", "m:0"),
        node("free", "MutexRelease", "m:0"),
        node("v", "Variable", dtype="int64", shape=[]),
        constant("zero", 0, "int64"),
        constant("one", 1, "int64"),
        node("set", "Assign", "v:0 zero:0"),
        node("read", "Read", "v:0", ctrl=["lock"]),
        node("next", "Add", "read:0 one:0"),
        node("write", "Assign", "v:0 next:0"),
        node("unlock", "MutexRelease", "m:0", ctrl=["write"]),
        constant("flat", [[0.0]]),
        node("fail", "MatrixInverse", "flat:0", ctrl=["lock"]),
    ]
    with Session(Graph(nodes)) as session:
        session.run("set")
        threads = [in_thread(lambda: [session.run("unlock") for _ in range(25)])[0] for _ in range(4)]
        for thread in threads:
            thread.join()
        assert session.run("v:0") == 100
        with pytest.raises(GraphError):
            session.run("fail")
        session.run("lock")
        thread, results = in_thread(lambda: session.run("lock2"))
        wait_until_waiting(session, 1, thread)
        session.run("free")
        thread.join()
        session.run("free")
        with pytest.raises(GraphError, match="not held"):
            session.run("free")

    assert results == [None]


# -- Readers -------------------------------------------------------------------------------------------


def test_records_are_those_that_another_program_wrote_each_to_one_run(tmp_path: Path) -> None:
    from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped]

    records = [bytes([k]) * k * 100 for k in range(7)]
    for part in range(2):
        writer = RecordWriter(str(tmp_path / f"{part}"))
        for record in records[part::2]:
            writer.write(record)
        writer.close()
    write_tfrecords(tmp_path / "ours", records)
    files = [str(tmp_path / "0"), str(tmp_path / "1")]
    nodes = [node("r", "TFRecords", files=files), node("o", "TFRecords", files=[str(tmp_path / "ours")])]
    with Session(Graph(nodes)) as session:
        results = [session.run(["r:0", "o:0"]) for _ in range(7)]
        with pytest.raises(GraphError) as caught:
            session.run("r:0")

    assert [each.item() for each, _ in results] == records[0::2] + records[1::2]
    assert [each.item() for _, each in results] == records
    assert caught.value.kind == "out_of_range"


@for_each(
    ("where", "part"),
    [(3, "damaged length"), (15, "damaged: its checksum"), (-1, "cut off|more"), (None, "more")],
    ids=["length", "content", "cut", "huge"],
)
def test_a_damaged_record_is_named_with_its_file_number_and_byte(
    tmp_path: Path, where: int | None, part: str
) -> None:
    file = tmp_path / "records"
    write_tfrecords(file, [b"first", b"second"])
    data, second = bytearray(file.read_bytes()), 12 + 5 + 4
    if where is None:
        head = struct.pack("<Q", 2**60)
        from penstock.graph.state.readers import masked_crc32c

        data[second : second + 12] = head + struct.pack("<I", masked_crc32c(head))
    elif where == -1:
        del data[-3:]
    else:
        data[second + where] ^= 1
    file.write_bytes(bytes(data))
    with Session(Graph([node("r", "TFRecords", files=[str(file)])])) as session:
        assert session.run("r:0").item() == b"first"
        for _ in range(2):  # it stays, and nothing is skipped
            with pytest.raises(GraphError, match=rf"record 1 at byte {second} .*({part})") as caught:
                session.run("r:0")
            assert caught.value.kind == "corrupt"


def test_without_its_library_a_checksum_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)

    with pytest.raises(ConfigError, match=r"google-crc32c, .*pip install 'penstock\[torch\]'"):
        write_tfrecords(tmp_path / "records", [b"first"])


def test_lines_and_records_of_a_length(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n\r\n\n\xfftwo")
    (tmp_path / "b").write_bytes(b"abcde")
    nodes = [
        node("l", "TextLines", files=[str(tmp_path / "a"), str(tmp_path / "b")]),
        node("f", "FixedRecords", files=[str(tmp_path / "b")], record_bytes=3),
    ]
    with Session(Graph(nodes)) as session:
        lines = [session.run("l:0").item() for _ in range(5)]
        assert session.run("f:0").item() == b"abc"
        with pytest.raises(GraphError, match=r"record 1 at byte 3 is cut off") as caught:
            session.run("f:0")

    assert lines == [b"one", b"\r", b"", b"\xfftwo", b"abcde"]
    assert caught.value.kind == "corrupt"


def test_rows_of_csv_have_a_scalar_for_each_column(tmp_path: Path) -> None:
    """Written by Python's csv module, with all that a field in quotes may hold; then rows that are no such rows."""
    rows = [(1, 0.5, 'a "b", c'), (-128, float("inf"), "two\nlines\r\n"), (127, 1e-3, "")]
    with open(tmp_path / "a", "w", newline="") as file:
        csv.writer(file).writerows([("count", "size", "name"), *rows])
    columns = ["int8", "float32", "bytes"]
    table = node("t", "CSVRows", files=[str(tmp_path / "a")] * 2, columns=columns, skip_lines=1)
    with Session(Graph([table])) as session:
        read = [session.run(["t:0", "t:1", "t:2"]) for _ in range(6)]
        with pytest.raises(GraphError, match="no more records") as caught:
            session.run("t:0")

    assert caught.value.kind == "out_of_range"
    assert [(int(a), float(b), c.item().decode()) for a, b, c in read] == [
        (a, float(np.float32(b)), c) for a, b, c in rows
    ] * 2
    assert [each.dtype for each in read[0]] == [np.int8, np.float32, object]

    for text, problem in (
        (b"1\t2\n128\t2\n", "record 1 at byte 4 has '128' in column 0, which is no int8"),
        (b"1\t2\n\n3\n", "record 1 at byte 4 has 1 fields, and the node has 2 columns"),
        (b'1\t2\n1\t"2\n', "record 1 at byte 4 has a quote that is not closed"),
        (b'1\t2\n1\t"2"3\n', "record 1 at byte 4 is no row of CSV"),
    ):
        (tmp_path / "b").write_bytes(text)
        nodes = [node("t", "CSVRows", files=[str(tmp_path / "b")], columns=["int8", "int8"], delimiter="\t")]
        with Session(Graph(nodes)) as session:
            assert session.run(["t:0", "t:1"]) == [1, 2]
            with pytest.raises(GraphError, match=problem) as caught:
                session.run("t:0")
        assert caught.value.kind == "corrupt"


# -- State ---------------------------------------------------------------------------------------------


def test_a_restore_reads_the_tensor_of_its_name_alone(tmp_path: Path) -> None:
    names = ["a/b", "a~1b", "*", "a", "é"]
    nodes = [constant(f"c{place}", float(place)) for place in range(len(names))]
    nodes += [
        node("save", "Save", " ".join(each["name"] for each in nodes), names=names, path=str(tmp_path)),
        constant("other", [2.0**100] * 9),
        node("more", "Save", "other:0", names=["other"], path=str(tmp_path)),
        node("lost", "Restore", tensor="a*", dtype="float32", path=str(tmp_path)),
        node("damaged", "Restore", tensor="other", dtype="float32", path=str(tmp_path)),
        node("typed", "Restore", tensor="a", dtype="int32", path=str(tmp_path)),
    ]
    back = [
        node(f"r{place}", "Restore", tensor=name, dtype="float32", path=str(tmp_path))
        for place, name in enumerate(names)
    ]
    with Session(Graph([*nodes, *back])) as session:
        session.run("save")
        session.run("more")
        bits = np.float32(2.0**100).tobytes()
        (file,) = [each for each in tmp_path.rglob("*") if each.is_file() and 9 * bits in each.read_bytes()]
        file.write_bytes(file.read_bytes().replace(9 * bits, 9 * bits[::-1]))

        # The tensor called * is a pattern that fits all: only its restore meets the damage.
        restored = [session.run(f"r{place}:0") for place in (0, 1, 3, 4)]
        errors = []
        for fetch in ("lost:0", "damaged:0", "typed:0"):
            with pytest.raises(GraphError) as caught:
                session.run(fetch)
            errors.append(caught.value)

    assert restored == [0, 1, 3, 4]
    assert [error.kind for error in errors] == ["not_found", "kernel", "mismatch"]
    assert "did you mean 'a'" in str(errors[0])


class Counter:
    """Batches that count, and can be put back."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.count += 1
            yield self.count

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int) -> None:
        self.count = state


def test_a_fresh_session_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a\nb\nc\nd\n")
    nodes = [
        X,
        node("q", "RandomShuffleQueue", capacity=9, components=[["int32", []]]),
        *COMMON[1:],
        node("lines", "TextLines", files=[str(tmp_path / "lines")]),
        node("batch", "NextBatch", batches="count", outputs=[["int64", []]]),
        node("draw", "RandomUniform", shape=[2]),
        node("v", "Variable", dtype="quint8", shape=[2]),
        node("w", "Placeholder", dtype="quint8", shape=[2]),
        node("set", "Assign", "v:0 w:0"),
        node("shared", "Variable", dtype="bytes", shape=[], container=str(tmp_path)),
        constant("text", "x", "bytes")
        | {"attr": {"value": {"dtype": "bytes", "shape": [], "data": ["AP8="]}}},
        node("name", "Assign", "shared:0 text:0"),
    ]
    fetches = ["take:0", "lines:0", "batch:0", "draw:0", "v:0", "shared:0"]

    def later(session: Session) -> Any:
        return [[each.tolist() for each in session.run(fetches)] for _ in range(2)]

    with Session(Graph(nodes), seed=5, batches={"count": Counter()}) as session:
        session.run(["set", "name"], {"w": np.array([1, 255], np.uint8)})
        put(session, *range(6))
        session.run(["take:0", "lines:0", "batch:0", "draw:0"])
        session.save(str(tmp_path / "state"))
        expected = later(session)
    with Session(Graph(nodes), seed=5, batches={"count": Counter()}) as fresh:
        fresh.restore(str(tmp_path / "state"))
        assert later(fresh) == expected
        # Also where the run was planned before.
        fresh.restore(str(tmp_path / "state"))
        assert later(fresh) == expected
    with Session(Graph(nodes), seed=5, batches={"count": Counter()}) as fresh:
        fresh.restore(str(tmp_path / "state"))
        fresh.save(str(tmp_path / "again"))
        fresh.restore(str(tmp_path / "again"))
        assert later(fresh) == expected


def counting() -> Graph:
    """Return a graph that counts its steps."""
    return Graph(
        [
            node("v", "Variable", dtype="int32", shape=[]),
            constant("zero", 0, "int32"),
            constant("one", 1, "int32"),
            node("start", "Assign", "v:0 zero:0"),
            node("step", "AssignAdd", "v:0 one:0"),
        ]
    )


def test_a_run_that_starts_again_goes_on_from_the_last_save_that_was_due(tmp_path: Path) -> None:
    def train(until: int) -> tuple[int, list[int]]:
        """Return the step that a run begins with, and the steps after which it saved."""
        with Session(counting()) as session, session.saving(str(tmp_path), "3 steps") as saves:
            if not saves.step:
                session.run("start")
            begun = saves.step
            saved = []
            for step in range(begun, until):
                assert session.run("step:0") == step + 1
                if saves.after(step + 1):
                    saved.append(step + 1)
            return begun, saved

    assert train(8) == (0, [3, 6])
    assert train(13) == (6, [9, 12])
    with Session(counting()) as session:
        session.restore(str(tmp_path))
        assert session.run("v:0") == 12


def test_a_save_that_fails_is_raised_once_and_the_one_before_is_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Session(counting()) as session, session.saving(str(tmp_path), "2 steps") as saves:
        session.run("start")
        session.run("step")
        saves.after(2)
        assert saves.has_any  # it is written
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", is_full)
            saves.after(4)
            with pytest.raises(DataError, match="step 4 was not saved"):
                print(saves.step)
            assert saves.step == 2
            session.run("step")
            saves.after(6)
            assert saves.go_back()
            assert session.run("step:0") == 2
        with pytest.raises(DataError, match="step 6 was not saved"):
            saves.after(8)
        assert saves.step == 8


def test_a_folder_of_a_state_and_one_of_tensors_are_told_apart_and_neither_replaces_the_other(
    tmp_path: Path,
) -> None:
    tensors, state = str(tmp_path / "tensors"), str(tmp_path / "state")
    nodes = [
        constant("c", 1.0),
        node("save", "Save", "c:0", names=["v"], path=tensors),
        node("wrong", "Save", "c:0", names=["v"], path=state),
        node("get", "Restore", tensor="v", dtype="float32", path=state),
    ]
    with Session(Graph(nodes)) as session:
        session.run("save")
        session.save(state)
        for call, advice in (
            (lambda: session.run("get:0"), "state of a session, which Session.restore reads"),
            (lambda: session.run("wrong"), "state of a session, which Session.restore reads"),
            (lambda: session.save(tensors), "tensors of Save nodes, which a Restore node reads"),
            (lambda: session.restore(tensors), "tensors of Save nodes, which a Restore node reads"),
            (lambda: session.saving(tensors, "1 step").__enter__(), "tensors of Save nodes"),
        ):
            with pytest.raises(GraphError, match=advice) as caught:
                call()
            assert caught.value.kind == "mismatch"
        session.restore(state)


def test_draws_depend_on_seed_name_and_run_alone() -> None:
    a, b = node("a", "RandomUniform", shape=[3]), node("b", "RandomUniform", shape=[3])

    def draws(nodes: list[dict[str, Any]], fetches: list[str], seed: int) -> Any:
        with Session(Graph(nodes), seed=seed) as session:
            return [session.run(fetches)[0].tolist() for _ in range(2)]

    alone = draws([a], ["a:0"], 1)
    assert draws([b, a], ["a:0", "b:0"], 1) == alone
    assert draws([a], ["a:0"], 2) != alone
    assert alone[0] != alone[1]
    assert all(0 <= number < 1 for number in alone[0])
    order = evaluate([constant("c", [[1.0], [2.0], [3.0]]), node("s", "Shuffle", "c:0")], "s:0")
    assert sorted(order.ravel().tolist()) == [1, 2, 3]


def test_sessions_that_are_saved_at_once_lock_their_containers_in_one_order(tmp_path: Path) -> None:
    """Each would else hold a container that the other waits for."""
    names = [str(tmp_path / name) for name in "ab"]
    taken: list[str] = []

    class Lock:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            taken.append(self.name)

        def __exit__(self, *error: object) -> None:
            pass

    orders = []
    for used in (names, names[::-1]):
        nodes = [node(f"m{name}", "Mutex", container=name) for name in used]
        with Session(Graph(nodes)) as session, pytest.MonkeyPatch.context() as patched:
            session.run((), targets=[each["name"] for each in nodes])
            for name in names:
                patched.setattr(shared_container(name), "lock", Lock(name))
            taken.clear()
            session.save(str(tmp_path / "state"))
            orders.append(list(dict.fromkeys(taken)))

    assert orders == [names, names]


def test_a_save_that_writes_holds_no_draw_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        constant("c", 1.0),
        node("save", "Save", "c:0", names=["c"], path=str(tmp_path / "saved")),
        node("draw", "RandomUniform", shape=[]),
    ]
    was_free = []
    with Session(Graph(nodes)) as session:

        def write(*given: Any) -> None:
            thread, _ = in_thread(lambda: session.run("draw:0"))
            thread.join(patient(20))
            was_free.append(not thread.is_alive())

        monkeypatch.setattr(resources, "write_tensors", write)
        session.run("save")

    assert was_free == [True]


def test_sessions_share_what_is_in_a_named_container_and_nothing_else(tmp_path: Path) -> None:
    def nodes(container: str) -> list[dict[str, Any]]:
        return [
            node("v", "Variable", dtype="int32", shape=[], container=container),
            constant("c", 5, "int32"),
            node("set", "Assign", "v:0 c:0"),
        ]

    for container, is_shared in ((str(tmp_path), True), ("", False)):
        with Session(Graph(nodes(container))) as one, Session(Graph(nodes(container))) as other:
            one.run("set")
            if is_shared:
                assert other.run("v:0") == 5
            else:
                with pytest.raises(GraphError, match="assigned"):
                    other.run("v:0")
