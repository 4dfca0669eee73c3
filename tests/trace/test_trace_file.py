"""A trace file gives back what was written, all of it before a cut, and nothing that was damaged."""

from __future__ import annotations

import json
import resource
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.spans import spans_of

from penstock.errors import ConfigError, FormatError
from penstock.trace import JSON, NO_PLACE, SOURCE, SPAN, Kind, Spans, Trace, TraceWriter, read_trace

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
        data += checked(b"SPAN" + struct.pack("<II", len(chunk), zlib.crc32(chunk))) + chunk
    return data + THE_END


#: The end of a trace of which nothing was dropped.
THE_END = checked(b"DONE" + struct.pack("<II", 8, zlib.crc32(bytes(8)))) + bytes(8)


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


def test_the_golden_file_reads_as_it_always_did() -> None:
    trace = read_trace(GOLDEN)

    assert trace.spans.tolist() == spans_of(GOLDEN_ROWS).tolist()
    assert trace.meta == META
    assert trace.is_complete
    (epoch,) = trace.epochs()
    assert (epoch.stall_seconds, epoch.own_seconds, epoch.reads_by_place) == (0.8125, 0.6875, {SOURCE: 1})


def test_the_golden_file_is_written_as_it_always_was(tmp_path: Path) -> None:
    spans = spans_of(GOLDEN_ROWS)

    assert written(tmp_path / "trace", spans[:5], spans[5:]) == GOLDEN.read_bytes()


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
    ends = np.cumsum([header_bytes, *(16 + 64 * count for count in counts)])
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


def test_every_flipped_bit_is_found_and_its_chunk_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = written(path, numbered_spans(0, 1), numbered_spans(1, 2))

    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(FormatError, match=str(path)):
            read_trace(path)
    second_chunk = len(by_the_book(META)) - len(THE_END) + 16 + 64
    damaged = bytearray(data)
    damaged[second_chunk + 20] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        FormatError, match=f"damaged at offset {second_chunk}: the checksum of a chunk's spans"
    ):
        read_trace(path)


def test_bytes_after_the_end_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = written(path, numbered_spans(0, 1))
    path.write_bytes(data + b"more")

    with pytest.raises(FormatError, match=f"damaged at offset {len(data)}: 4 bytes follow its end"):
        read_trace(path)


def test_a_file_of_a_later_version_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(checked(b"PENTRACE" + struct.pack("<III", 3, 0, 0)) + b"whatever version 3 may hold")

    with pytest.raises(FormatError, match=r"version 3 \(offset 8\); this Penstock reads version 2"):
        read_trace(path)


def test_a_chunk_that_is_whole_but_unknown_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(by_the_book(META, b"not a whole number of spans"))

    with pytest.raises(FormatError, match="b'SPAN' of 27 bytes"):
        read_trace(path)


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


def test_a_disk_that_is_full_from_the_beginning_is_an_error_that_leaves_nothing_open() -> None:
    """/dev/full takes no byte, as a full disk does."""
    with pytest.raises(OSError, match="No space left"):
        TraceWriter("/dev/full", META)


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


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[]", b"nothing", b"9" * 5000, b"\xff"])
def test_a_header_that_is_no_json_object_is_damage(tmp_path: Path, text: bytes) -> None:
    prelude = struct.pack("<8sIII", b"PENTRACE", 2, len(text), zlib.crc32(text))
    (tmp_path / "trace").write_bytes(checked(prelude) + text + THE_END)

    with pytest.raises(FormatError, match="its meta is no JSON") as caught:
        read_trace(tmp_path / "trace")
    assert str(caught.value).startswith(f"{tmp_path / 'trace'} is damaged at offset 24: ")


@pytest.mark.parametrize("field", ["start", "end"])
@pytest.mark.parametrize("seconds", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_a_span_without_a_time_is_damage(tmp_path: Path, field: str, seconds: float) -> None:
    spans = numbered_spans(0, 3).copy()
    spans[field][1] = seconds
    written(tmp_path / "trace", spans)

    with pytest.raises(
        FormatError, match=f"trace is damaged at offset .*: a span has no time as its {field}"
    ):
        read_trace(tmp_path / "trace")


def test_closing_twice_is_harmless_and_appending_after_it_an_error(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", META)
    writer.close()
    writer.close()

    with pytest.raises(ConfigError, match="is closed"):
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


def test_a_recording_of_blocks_is_no_trace_and_the_command_that_reads_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.blocks"
    path.write_bytes(b"PENBLOCK" + bytes(20))

    with pytest.raises(FormatError, match=r"a loader wrote with trace=; .* penstock trace blocks --import"):
        read_trace(path)
