"""A trace file gives back what was written, all of it before a cut, and nothing that was damaged."""

from __future__ import annotations

import json
import os
import resource
import struct
import tracemalloc
import zlib
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each
from tests.spans import spans_of

from penstock.errors import ClosedError, ConfigError, FormatError
from penstock.trace import (
    JSON,
    NO_PLACE,
    SOURCE,
    SPAN,
    Cause,
    Kind,
    Spans,
    Summary,
    Trace,
    TraceWriter,
    read_trace,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "trace-v2.penstock"
META: dict[str, JSON] = {"loader": "penstock", "batch_size": 2, "note": "zwölf"}


def numbered_spans(first: int, count: int) -> Spans:
    spans = np.zeros(count, SPAN)
    spans["sample"] = np.arange(first, first + count)
    spans["start"] = spans["sample"] * 0.5
    spans["end"] = spans["start"] + 0.25
    return spans


def written(path: Path, *chunks: Spans) -> bytes:
    with TraceWriter(path, META) as writer:
        for chunk in chunks:
            writer.append(chunk)
    return path.read_bytes()


def checked(head: bytes) -> bytes:
    return head + struct.pack("<I", zlib.crc32(head))


def by_the_book(meta: dict[str, JSON], *chunks: bytes) -> bytes:
    """A trace file as the module's description has it, put together without the module."""
    text = json.dumps(meta, sort_keys=True, ensure_ascii=False).encode()
    data = checked(b"PENTRACE" + struct.pack("<III", 2, len(text), zlib.crc32(text))) + text
    for chunk in chunks:
        data += checked(b"SPAN" + struct.pack("<III", 1, len(chunk), zlib.crc32(chunk))) + chunk
    return data + THE_END


#: The end of a trace of which nothing was dropped.
THE_END = checked(b"DONE" + struct.pack("<III", 1, 8, zlib.crc32(bytes(8)))) + bytes(8)


#: Two batches, as the golden file holds them: in two chunks, of five spans and of three. One of a sample that was read;
#: one of 64, taken from a tier of rank 5.
GOLDEN_ROWS = [
    (0.0, 0.125, -1, 0, 0, 0, Kind.SLOT, NO_PLACE, 0, 3),
    (0.125, 0.5, 1_796, 118_304, 0, 0, Kind.READ, SOURCE, 1, 3, 1, -1, 1),
    (0.5, 0.75, 1_796, 0, 0, 0, Kind.DECODE, NO_PLACE, 2, 3, 1, -1, 1),
    (0.0, 0.8125, -1, 0, 0, 0, Kind.WAIT, NO_PLACE, 0, 3, 1),
    (0.8125, 1.5, -1, 0, 0, 0, Kind.STEP, NO_PLACE, 0, 3, 1),
    (0.25, 0.25, 2**40, 7, 0, 1, Kind.HIT, 1, 65_535, 3, 64, 5, 2**64 - 1),
    (0.75, 1.0, 2**40, 0, 0, 1, Kind.DECODE, NO_PLACE, 2, 3, 64, -1, 2**64 - 1),
    (1.5, 1.5, -1, 0, 0, 1, Kind.WAIT, NO_PLACE, 0, 3, 64),
]


IDS = {(3, 2**64 - 1): np.arange(2**40, 2**40 + 64)}
NAMES, HOSTS = {1_796: "cats/zwölf\udcff.jpg"}, {3: "node3"}


def write_golden(path: Path) -> None:
    spans = spans_of(GOLDEN_ROWS)
    with TraceWriter(path, META) as writer:
        writer.append(spans[:5])
        writer.name(NAMES, HOSTS)
        writer.append(spans[5:], ids=IDS)


def test_the_golden_file_reads_as_it_always_did() -> None:
    trace = read_trace(GOLDEN)

    assert trace.spans.tolist() == spans_of(GOLDEN_ROWS).tolist()
    assert trace.meta == META
    assert trace.is_complete
    assert {group: ids.tolist() for group, ids in trace.ids.items()} == {
        (3, 2**64 - 1): [*range(2**40, 2**40 + 64)]
    }
    assert (trace.names, trace.hosts) == (NAMES, HOSTS)
    (epoch,) = trace.epochs()
    assert (epoch.stall_seconds, epoch.own_seconds, epoch.reads_by_place) == (0.8125, 0.6875, {SOURCE: 1})


def test_the_golden_file_is_written_as_it_always_was(tmp_path: Path) -> None:
    write_golden(tmp_path / "trace")

    assert (tmp_path / "trace").read_bytes() == GOLDEN.read_bytes()


def test_the_writer_follows_the_description_of_the_format(tmp_path: Path) -> None:
    one, two = numbered_spans(0, 3), numbered_spans(3, 2)

    assert written(tmp_path / "trace", one, two) == by_the_book(META, one.tobytes(), two.tobytes())


def test_what_is_written_comes_back_bit_for_bit_whatever_its_length(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    random = np.frombuffer(generator.bytes(150_000 * 64), SPAN).copy()
    for name in ("start", "end"):
        random[name] = generator.normal(0.0, 1e9, random.size)

    written(tmp_path / "trace", random, random[:0], random[:1])
    trace = read_trace(tmp_path / "trace")

    assert trace.spans.tobytes() == random.tobytes() + random[:1].tobytes()
    assert trace.is_complete


@for_each("ids", [[], [0, 2**32 - 1], [2**32], [-1, 5]])
def test_ids_come_back_whether_they_fit_32_bits_or_not(tmp_path: Path, ids: list[int]) -> None:
    """Also after more and fewer of another size were written in between."""
    groups = {(3, 7): ids, (3, 8): [0, 1], (3, 9): [2**40, *range(9)], (3, 10): [4]}
    with TraceWriter(tmp_path / "trace", META) as writer:
        for some in ([(3, 7), (3, 8)], [(3, 9)], [(3, 10)]):
            writer.append(numbered_spans(0, 1), ids={each: np.array(groups[each], np.int64) for each in some})

    trace = read_trace(tmp_path / "trace")

    assert {group: of_group.tolist() for group, of_group in trace.ids.items()} == groups
    assert all(of_group.dtype == np.int64 for of_group in trace.ids.values())


def test_a_trace_of_nothing_is_complete_and_empty(tmp_path: Path) -> None:
    written(tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")

    assert (trace.spans.size, trace.spans.dtype, trace.is_complete) == (0, SPAN, True)
    assert trace.epochs() == []


def test_every_cut_leaves_all_whole_chunks_before_it_and_says_that_it_is_cut(tmp_path: Path) -> None:
    """A full disk, a kill -9, a node that died: the file ends anywhere."""
    path = tmp_path / "trace"
    counts = [2, 1, 3]
    chunks = [numbered_spans(10 * n, count) for n, count in enumerate(counts)]
    data = written(path, *chunks)
    header_bytes = len(by_the_book(META)) - len(THE_END)
    ends = np.cumsum([header_bytes, *(20 + 64 * count for count in counts)])
    assert ends[-1] + len(THE_END) == len(data)

    for cut in range(header_bytes, len(data)):
        path.write_bytes(data[:cut])
        trace = read_trace(path)
        whole = int(np.searchsorted(ends, cut, side="right")) - 1
        assert (
            trace.spans["sample"].tolist()
            == np.concatenate([[], *(c["sample"] for c in chunks[:whole])]).tolist()
        )
        assert not trace.is_complete
        assert trace.meta == META


def test_a_cut_within_the_header_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = written(path, numbered_spans(0, 1))
    header_bytes = len(by_the_book(META)) - len(THE_END)

    for cut in range(1, header_bytes):
        path.write_bytes(data[:cut])
        with pytest.raises(FormatError, match=f"trace breaks off at offset {cut}, within its header"):
            read_trace(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="is not a trace"):
        read_trace(path)


def test_any_flipped_bit_is_found_and_its_chunk_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = written(path, numbered_spans(0, 1), numbered_spans(1, 2))

    for bit in range(0, 8 * len(data), 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(FormatError, match=str(path)):
            read_trace(path)
    second_chunk = len(by_the_book(META)) - len(THE_END) + 20 + 64
    damaged = bytearray(data)
    damaged[second_chunk + 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        FormatError, match=f"damaged at offset {second_chunk}: the checksum of a chunk's content"
    ):
        read_trace(path)


def test_bytes_after_the_end_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = written(path, numbered_spans(0, 1))
    path.write_bytes(data + b"more")

    with pytest.raises(FormatError, match=f"damaged at offset {len(data)}: bytes follow its end"):
        read_trace(path)


def test_a_file_of_a_later_version_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(checked(b"PENTRACE" + struct.pack("<III", 3, 0, 0)) + b"whatever version 3 may hold")

    with pytest.raises(FormatError, match=r"version 3 \(offset 8\); this Penstock reads version 2"):
        read_trace(path)


def test_a_chunk_that_nobody_knows_is_skipped_and_one_that_does_not_fit_its_tag_is_damage(
    tmp_path: Path,
) -> None:
    """Of a later Penstock: a chunk of a new tag, or of a known one laid out anew."""
    path = tmp_path / "trace"
    spans = numbered_spans(0, 2)
    data = written(path, spans)
    other = [
        checked(tag + struct.pack("<III", version, 5, zlib.crc32(b"other"))) + b"other"
        for tag, version in ((b"WHAT", 1), (b"SPAN", 2), (b"SUMS", 2))
    ]
    path.write_bytes(data[: -len(THE_END)] + b"".join(other) + THE_END)

    trace = read_trace(path)

    assert (trace.spans.tolist(), trace.is_complete) == (spans.tolist(), True)
    path.write_bytes(by_the_book(META, b"no whole number of spans"))
    with pytest.raises(FormatError, match="its chunk b'SPAN' cannot be read"):
        read_trace(path)


def a_summary(**changes: object) -> bytes:
    said: dict[str, Any] = {
        "epoch": 0,
        "epochs": 1,
        "seconds": 1.0,
        "samples": 1,
        "steps": 1,
        "stall_seconds": 0.0,
    }
    said |= {"stall_by_cause": dict.fromkeys(map(str, Cause), 0.0), "own_seconds": 1.0, "save_seconds": 0.0}
    stage: dict[str, Any] = {
        "kind": "READ",
        "place": -1,
        "of_peers": False,
        "calls": 1,
        "samples": 1,
        "bytes": 1,
    }
    stage |= {"seconds": 1.0, "slowest_seconds": 1.0, "counts": [[3, 1]]}
    for name, value in changes.items():
        (stage if name in stage else said)[name] = value
    return zlib.compress(
        json.dumps({"spans": 1, "epochs": [said | {"meanwhile": {}, "stages": [stage]}]}).encode()
    )


@for_each(
    ("tag", "payload"),
    [
        (b"IDS ", b""),
        (b"IDS ", struct.pack("<I", 2**31)),
        (b"IDS ", struct.pack("<IQIIq", 1, 7, 0, 2, 5)),
        (b"ID32", struct.pack("<IQIII", 1, 7, 0, 2, 5)),
        (b"NAME", b"{"),
        (b"NAME", b"[1]"),
        (b"NAME", b'{"samples": {"x": "y"}}'),
        (b"NAME", b'{"samples": 3}'),
        (b"SLOW", b"x"),
        (b"SUMS", b"no zlib"),
        (b"SUMS", zlib.compress(b"[]")),
        (b"SUMS", zlib.compress(b"[" * 100_000)),
        (b"SUMS", zlib.compress(bytes(65 << 20))),
        (b"SUMS", a_summary()[:-3]),
        (b"SUMS", a_summary(seconds=float("nan"))),
        (b"SUMS", a_summary(stall_by_cause={})),
        (b"SUMS", a_summary(kind="WHAT")),
        (b"SUMS", a_summary(counts=[[162, 1]])),
        (b"SUMS", a_summary(counts=[[-1, 1]])),
    ],
)
def test_chunks_that_cannot_be_what_they_say_are_damage(tmp_path: Path, tag: bytes, payload: bytes) -> None:
    chunk = checked(tag + struct.pack("<III", 1, len(payload), zlib.crc32(payload))) + payload
    (tmp_path / "odd").write_bytes(by_the_book(META)[: -len(THE_END)] + chunk)

    with pytest.raises(FormatError, match=f"odd is damaged at offset 81: its chunk {tag!r} cannot be read"):
        read_trace(tmp_path / "odd")


def test_a_summary_by_the_book_is_read(tmp_path: Path) -> None:
    """That of the test above, without what is wrong in it."""
    payload = a_summary()
    chunk = checked(b"SUMS" + struct.pack("<III", 1, len(payload), zlib.crc32(payload))) + payload
    (tmp_path / "sums").write_bytes(by_the_book(META)[: -len(THE_END)] + chunk + THE_END)

    trace = read_trace(tmp_path / "sums")

    (epoch,) = trace.epochs()
    assert (epoch.steps, epoch.own_seconds, epoch.reads_by_place) == (1, 1.0, {SOURCE: 1})
    assert (trace.left_out.spans, trace.spans.size) == (1, 0)


def test_a_chunk_that_claims_more_than_the_file_has_is_a_cut_and_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(
        by_the_book(META)[: -len(THE_END)] + checked(b"SPAN" + struct.pack("<III", 1, 2**32 - 1, 0))
    )
    tracemalloc.start()
    try:
        trace = read_trace(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (trace.spans.size, trace.is_complete) == (0, False)
    assert most < 1 << 20


def test_a_file_is_read_chunk_by_chunk(tmp_path: Path) -> None:
    """Beside the spans themselves, twice a chunk at most."""
    spans, chunk_bytes = numbered_spans(0, 8 * 65_536), 65_536 * 64
    written(tmp_path / "trace", spans)
    tracemalloc.start()
    try:
        trace = read_trace(tmp_path / "trace")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert trace.spans.size == spans.size
    assert most < spans.nbytes + 2.2 * chunk_bytes


def test_a_recorded_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    data = written(tmp_path / "trace", numbered_spans(0, 3))
    reads, writes = os.pipe()
    os.write(writes, data)
    os.close(writes)

    try:
        assert read_trace(f"/dev/fd/{reads}").spans["sample"].tolist() == [0, 1, 2]
    finally:
        os.close(reads)


# -- A run too long for its file ---------------------------------------------------------------------------


def turned(path: Path, turns: int, most_bytes: int = 64 * 40) -> None:
    """Halves of 20 spans; before each turn, all that came is summed up but its last two spans."""
    with TraceWriter(path, META, most_bytes) as writer:
        for number in range(turns):
            writer.append(numbered_spans(20 * number, 20))
            assert writer.is_turn_due
            summary = Summary(20 * number + 18, slowest=numbered_spans(number, 1))
            writer.turn(
                summary, numbered_spans(20 * number + 18, 2), {(0, 7): np.array([number])}, {1: "a"}, HOSTS
            )
        writer.append(numbered_spans(20 * turns, 1))


def test_a_file_keeps_the_newest_half_and_the_sums_of_what_came_before(tmp_path: Path) -> None:
    for turns, left_out, kept in (
        (0, 0, range(1)),
        (1, 0, range(21)),
        (2, 18, range(18, 41)),
        (3, 38, range(38, 61)),
    ):
        turned(tmp_path / "trace", turns)
        trace = read_trace(tmp_path / "trace")

        assert trace.left_out.spans == left_out
        assert trace.spans["sample"].tolist() == list(kept)
        assert (trace.is_complete, trace.meta) == (True, META)
        if left_out:
            assert trace.left_out.slowest["sample"].tolist() == [turns - 2]
            assert (trace.ids[0, 7].tolist(), trace.names, trace.hosts) == ([turns - 2], {1: "a"}, HOSTS)
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


def test_a_trace_behind_a_symbolic_link_stays_behind_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "trace").symlink_to(tmp_path / "disk" / "run")
    turned(tmp_path / "trace", 3)

    assert (tmp_path / "trace").is_symlink()
    assert read_trace(tmp_path / "disk" / "run").left_out.spans == 38


def test_a_disk_that_is_full_at_a_turn_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    writer = TraceWriter(path, META, most_bytes=64 * 40)
    writer.append(numbered_spans(0, 20))
    writer.turn(Summary(20), numbered_spans(0, 0))
    writer.append(numbered_spans(20, 20))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.turn(Summary(40), numbered_spans(0, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()

    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


def test_a_turn_that_is_interrupted_leaves_a_trace_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, before the new file has taken the old one's place and right after it."""
    path = tmp_path / "trace"
    replace = Path.replace

    def interrupt(self: Path, target: Path, *, replaces: bool) -> None:
        if replaces:
            replace(self, target)
        raise KeyboardInterrupt

    for replaces, kept in ((False, range(60)), (True, range(20, 60))):
        with TraceWriter(path, META, most_bytes=64 * 40) as writer:
            writer.append(numbered_spans(0, 20))
            writer.turn(Summary(20), numbered_spans(0, 0))
            writer.append(numbered_spans(20, 20))
            with monkeypatch.context() as patch:
                patch.setattr(Path, "replace", partialmethod(interrupt, replaces=replaces))
                with pytest.raises(KeyboardInterrupt):
                    writer.turn(Summary(40), numbered_spans(0, 0))
            writer.append(numbered_spans(40, 20))
        trace = read_trace(path)

        assert trace.spans["sample"].tolist() == list(kept)
        assert trace.left_out.spans == 60 - len(kept)
        assert [file.name for file in tmp_path.iterdir()] == ["trace"]


def test_what_is_no_file_of_a_disk_is_never_turned() -> None:
    with TraceWriter("/dev/null", META, most_bytes=1) as writer:
        writer.append(numbered_spans(0, 20))
        assert not writer.is_turn_due


def test_a_trace_of_which_spans_were_dropped_is_not_complete(tmp_path: Path) -> None:
    """The loader's rings overflowed: what the file holds is right, and sums over it are too small."""
    with TraceWriter(tmp_path / "trace", META) as writer:
        writer.append(numbered_spans(0, 2), dropped=3)
        writer.append(numbered_spans(2, 1))

    trace = read_trace(tmp_path / "trace")
    assert trace.spans["sample"].tolist() == [0, 1, 2]
    assert not trace.is_complete


def test_appended_spans_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    """So that a process killed at any moment leaves what it had appended."""
    with TraceWriter(tmp_path / "trace", META) as writer:
        writer.append(numbered_spans(0, 2))
        trace = read_trace(tmp_path / "trace")

    assert trace.spans["sample"].tolist() == [0, 1]
    assert not trace.is_complete


def test_a_run_that_ends_in_an_exception_leaves_a_trace_that_is_not_complete(tmp_path: Path) -> None:
    def run() -> None:
        with TraceWriter(tmp_path / "trace", META) as writer:
            writer.append(numbered_spans(0, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()

    trace = read_trace(tmp_path / "trace")
    assert trace.spans["sample"].tolist() == [0, 1]
    assert not trace.is_complete


def test_a_disk_that_is_full_from_the_beginning_is_an_error_that_leaves_nothing_open(tmp_path: Path) -> None:
    """/dev/full takes no byte, as a full disk does; a limit on the size of files stands in for one that has files."""
    with pytest.raises(OSError, match="No space left"):
        TraceWriter("/dev/full", META)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            TraceWriter(tmp_path / "trace", META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_within_a_chunk_costs_that_chunk_alone(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: it takes a part of the chunk, then no more."""
    path = tmp_path / "trace"
    writer = TraceWriter(path, META)
    writer.append(numbered_spans(0, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.append(numbered_spans(2, 50))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()

    trace = read_trace(path)
    assert trace.spans["sample"].tolist() == [0, 1]
    assert not trace.is_complete


@for_each("text", [b"[" * 100_000, b"[]", b"nothing", b"9" * 5000, b"\xff"])
def test_a_header_that_is_no_json_object_is_damage(tmp_path: Path, text: bytes) -> None:
    prelude = struct.pack("<8sIII", b"PENTRACE", 2, len(text), zlib.crc32(text))
    (tmp_path / "trace").write_bytes(checked(prelude) + text + THE_END)

    with pytest.raises(FormatError, match="its meta is no JSON") as caught:
        read_trace(tmp_path / "trace")
    assert str(caught.value).startswith(f"{tmp_path / 'trace'} is damaged at offset 24: ")


@for_each("field", ["start", "end"])
@for_each("seconds", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_a_span_without_a_time_is_damage(tmp_path: Path, field: str, seconds: float) -> None:
    spans = numbered_spans(0, 3).copy()
    spans[field][1] = seconds
    written(tmp_path / "trace", spans)

    with pytest.raises(
        FormatError, match=f"trace is damaged at offset .*: .*a span has no time as its {field}"
    ):
        read_trace(tmp_path / "trace")


def test_closing_twice_is_harmless_and_appending_after_it_an_error(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", META)
    writer.close()
    writer.close()

    with pytest.raises(ClosedError, match="is closed"):
        writer.append(numbered_spans(0, 1))
    assert read_trace(tmp_path / "trace").is_complete


def test_what_is_no_span_or_no_json_is_refused(tmp_path: Path) -> None:
    numbers = np.zeros(3, [("start", "<f8")])
    with TraceWriter(tmp_path / "trace", META) as writer, pytest.raises(ConfigError, match="spans are"):
        writer.append(numbers)
    with pytest.raises(ConfigError, match="is not JSON"):
        TraceWriter(tmp_path / "other", {"rate": float("nan")})
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConfigError, match="of 1 dimensions"):
        Trace(numbers)


@pytest.mark.parametrize(
    ("magic", "command"), [(b"PENBLOCK", "penstock trace blocks --import"), (b"PENWATCH", "penstock report")]
)
def test_another_record_is_no_trace_and_the_command_that_reads_it_is_named(
    magic: bytes, command: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.blocks"
    path.write_bytes(magic + bytes(20))

    with pytest.raises(FormatError, match=rf"a loader wrote with trace=; .* {command}"):
        read_trace(path)
