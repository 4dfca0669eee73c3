"""A stream of files or pages does to a drive what its lines say, and a line that says nothing is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError, FormatError
from penstock.machine.ssd import Drive, PageOp, Ssd
from penstock.simulate.wear import (
    DeleteFile,
    FileSpace,
    Operation,
    PageRuns,
    Phase,
    ReadFile,
    Stream,
    WriteFile,
    read_stream,
    run_stream,
    warm_drive,
    written_per_day,
)

SSD = Ssd(
    channels=2,
    chips_per_channel=1,
    blocks_per_chip=20,
    pages_per_block=4,
    page_bytes=512,
    page_read_seconds=1.0,
    page_write_seconds=10.0,
    block_erase_seconds=100.0,
    channel_bytes_per_second=float("inf"),
    over_provisioning=0.2,
    gc_threshold=0.1,
)


def stream_of(*lines: str) -> Stream:
    return read_stream(lines, "stream.csv")


# -- Text ------------------------------------------------------------------------------------------------


def test_lines_become_operations() -> None:
    stream = stream_of(
        "# a training", "", "phase,first", 'write,"one, two", 1 kB', 'read,"one, two"', 'delete,"one, two"'
    )

    assert stream.operations == (
        Phase("first", 3),
        WriteFile("one, two", 1_000, 4),
        ReadFile("one, two", 5),
        DeleteFile("one, two", 6),
    )


def test_lines_of_pages_become_runs_that_are_asked_together() -> None:
    first, _, second = stream_of(
        "write_pages,8,2", "# again", "trim_pages,8", "phase,next", "read_pages,0,3"
    ).operations

    assert isinstance(first, PageRuns)
    assert isinstance(second, PageRuns)
    assert first.ops.tolist() == [PageOp.WRITE, PageOp.TRIM]
    assert (first.firsts.tolist(), first.counts.tolist(), first.lines.tolist()) == ([8, 8], [2, 1], [1, 3])
    assert (second.ops.tolist(), second.lines.tolist()) == ([PageOp.READ], [5])


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1).filter(
    lambda name: not name.startswith('"')
)


def write_stream(stream: Stream) -> str:
    """Return the text from which `read_stream` makes the same operations."""
    rows: list[str] = []
    for operation in stream.operations:
        match operation:
            case PageRuns():
                runs = zip(
                    operation.ops.tolist(), operation.firsts.tolist(), operation.counts.tolist(), strict=True
                )
                rows += [f"{PageOp(op).name.lower()}_pages,{first},{count}" for op, first, count in runs]
            case Phase():
                rows.append(f"phase,{_quoted(operation.name)}")
            case WriteFile():
                rows.append(f"write,{_quoted(operation.name)},{operation.size_bytes}")
            case ReadFile():
                rows.append(f"read,{_quoted(operation.name)}")
            case DeleteFile():
                rows.append(f"delete,{_quoted(operation.name)}")
    return "".join(f"{row}\n" for row in rows)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',"\n\r') else name


FILE_OPERATIONS = st.lists(
    st.builds(Phase, NAMES)
    | st.builds(WriteFile, NAMES, st.integers(0, 10**12))
    | st.builds(ReadFile, NAMES)
    | st.builds(DeleteFile, NAMES)
)
RUNS = st.lists(st.tuples(st.sampled_from(PageOp), st.integers(0, 2**40), st.integers(1, 2**40)), min_size=1)


@given(FILE_OPERATIONS)
def test_a_stream_of_files_is_read_back(operations: list[Operation]) -> None:
    text = write_stream(Stream("", tuple(operations)))

    read = read_stream(text.splitlines(), "").operations

    assert [replace(each, line=0) for each in read if not isinstance(each, PageRuns)] == operations


@given(RUNS)
def test_a_stream_of_pages_is_read_back(runs: list[tuple[PageOp, int, int]]) -> None:
    ops, firsts, counts = (np.array(column) for column in zip(*runs, strict=True))
    written = PageRuns(ops.astype(np.uint8), firsts, counts, np.arange(len(runs)))

    (read,) = read_stream(write_stream(Stream("", (written,))).splitlines(), "").operations

    assert isinstance(read, PageRuns)
    assert list(zip(read.ops, read.firsts, read.counts, strict=True)) == runs


@for_each(
    ("line", "message"),
    [
        ("copy,a,1", "'copy' is no operation; the known ones are phase, write, read, delete, write_pages"),
        ("write,a", "'write,a' does not have its parts: write write,NAME,SIZE"),
        ("read,", "does not have its parts: write read,NAME"),
        ("delete,a,b", "does not have its parts"),
        ("write,a,-1", "'-1' has no unit|cannot be"),
        ("write,a,1 Gb", "'Gb'"),
        ("write,a,nan GB", "cannot be"),
        ("write_pages,1.5", "the first page is '1.5'; it must be an integer"),
        ("write_pages,1,0", "the number of pages is 0; it must be at least 1"),
        ("trim_pages", "has 1 parts: write trim_pages,FIRST"),
        ("read_pages,1,2,3", "has 4 parts"),
        (f"write_pages,{2**63}", "more than any drive has"),
        ("write_pages,5", "'write_pages' speaks of pages, the lines before of files"),
        ('write,"a,5', "unexpected end|does not have its parts"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(line: str, message: str) -> None:
    with pytest.raises(FormatError, match=r"stream\.csv, line 3: ") as caught:
        stream_of("# two lines that are right", "write,snap,5", line)

    assert caught.match(message)


def test_a_file_that_is_no_text_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("streams") / "photo.csv"
    path.write_bytes(b"write,a,1\n\xff\xfe\x00")

    with path.open(encoding="utf-8") as lines, pytest.raises(FormatError, match=r"photo\.csv.*not text"):
        read_stream(lines, str(path))


# -- Space for files --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30 * 512)), max_size=40))
def test_files_never_share_pages_and_all_space_comes_back(steps: list[tuple[bool, int]]) -> None:
    """Against a set of the pages that are taken."""
    space = FileSpace(SSD)
    taken: dict[str, set[int]] = {}
    for number, (is_write, size) in enumerate(steps):
        if is_write:
            name = str(number)
            try:
                runs = space.add(name, size)
            except ConfigError:
                stripes = {page // SSD.chips for pages in taken.values() for page in pages}
                assert SSD.exported_pages - SSD.chips * len(stripes) < size / 512 + SSD.chips
                continue
            pages = [page for first, count in runs for page in range(first, first + count)]
            assert len(pages) == -(-size // 512)
            assert not pages or pages[0] % SSD.chips == 0
            assert space.pages(name) == runs
            assert all(not taken[other] & set(pages) for other in taken)
            taken[name] = set(pages)
        elif taken:
            oldest = next(iter(taken))
            assert sum(count for _, count in space.remove(oldest)) == len(taken.pop(oldest))
    for name in space.names():
        space.remove(name)

    assert space.add("everything", SSD.exported_bytes) == [(0, SSD.exported_pages)]


# -- Running ---------------------------------------------------------------------------------------------


def test_work_is_summed_up_by_phase() -> None:
    stream = stream_of(
        "phase,save", "write,a,2048", "phase,restore", "read,a", "read,a", "phase,save", "delete,a"
    )

    result = run_stream(Drive(SSD), stream)

    save, restore = result.phases
    assert (save.name, save.work.written_pages, save.work.trimmed_pages) == ("save", 4, 4)
    assert restore.work.read_pages == 8
    assert restore.seconds == pytest.approx(4.0)  # two pages a chip, twice
    assert save.seconds == pytest.approx(20.0)
    assert result.seconds == pytest.approx(24.0)
    assert result.written_bytes == 2_048


def test_pages_of_a_phase_are_asked_at_once_and_files_one_after_the_other() -> None:
    pages = run_stream(warm_drive(SSD), stream_of("read_pages,0", "read_pages,1"))
    files = run_stream(Drive(SSD), stream_of("write,a,512", "write,b,512", "phase,read", "read,a", "read,b"))

    assert pages.seconds == pytest.approx(1.0)
    assert files.phases[1].seconds == pytest.approx(2.0)


def test_a_deleted_file_leaves_nothing_for_garbage_collection_to_move() -> None:
    """Half of the drive is one file at rest; the other half is written over and over."""
    half = SSD.exported_bytes // 2
    kept = ["write,rest," + str(half)]
    deleted = ["write,rest," + str(half), "delete,rest"]
    pages = np.random.default_rng(0).integers(SSD.exported_pages // 2, SSD.exported_pages, 2_000)
    moved = []
    for before in (kept, deleted):
        drive = Drive(SSD)
        run_stream(drive, stream_of(*before))
        drive.forget()
        moved.append(drive.run(np.zeros(2_000), pages, np.ones(2_000)).moved_pages)

    assert moved[1] < moved[0]


def test_a_repeated_stream_starts_without_the_files_of_the_last() -> None:
    stream = stream_of("write,a,5120", "write,b,5120", "delete,a")

    once = run_stream(Drive(SSD), stream)
    thrice = run_stream(Drive(SSD), stream, repeats=3)

    assert thrice.work.written_pages == 3 * once.work.written_pages
    assert thrice.work.trimmed_pages == 3 * 10 + 2 * 10


def test_phases_from_the_start_find_the_same_drive_each_time() -> None:
    """A save in the middle of a block takes an erase more than the one before it, unless each begins afresh."""
    text = [line for turn in range(6) for line in (f"phase,{turn}", f"write,{turn},1024", f"delete,{turn}")]

    apart = run_stream(warm_drive(SSD), stream_of(*text), phases_from_start=True)
    together = run_stream(warm_drive(SSD), stream_of(*text))

    assert len({phase.seconds for phase in apart.phases}) == 1
    assert len({phase.seconds for phase in together.phases}) > 1


def test_progress_counts_every_operation_once() -> None:
    told: list[int] = []
    stream = stream_of("write_pages,0,4", "write_pages,4,4", "phase,x", "trim_pages,0,8")

    run_stream(Drive(SSD), stream, repeats=2, done=told.append)

    assert stream.length == 4
    assert told[-1] == 8
    assert told == sorted(told)


def test_wear_is_that_of_the_stream_alone() -> None:
    drive = warm_drive(SSD)
    run_stream(drive, stream_of("write_pages,0,64"))
    before = drive.erases()

    result = run_stream(drive, stream_of("write_pages,0,64"))

    assert result.work.erases == result.wear.erases.sum() == drive.erases().sum() - before.sum() > 0


@for_each(
    ("lines", "message"),
    [
        (["write,a,512", "write,a,512"], "stream.csv, line 2: there is a file 'a' already: delete it first"),
        (["read,a"], "stream.csv, line 1: there is no file 'a'; those that were written .*: none"),
        (["write,b,1", "delete,a"], "line 2: there is no file 'a'; .*: b"),
        (["write,a,1 GB"], "'a' needs 1,953,125 pages, and 128 of the drive's 128 are free"),
        (
            ["read_pages,0", "# more", "trim_pages,127,2"],
            "line 3: 2 pages from page 127 are beyond .* 128 pages",
        ),
    ],
)
def test_what_the_drive_cannot_do_is_named_with_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_stream(Drive(SSD), stream_of(*lines))


@pytest.mark.parametrize("size", [-50_000, float("nan"), 1.5])
def test_a_file_has_a_whole_number_of_bytes(size: int) -> None:
    with pytest.raises(ConfigError, match=r"'a' is to be of .* bytes; its size is an integer"):
        WriteFile("a", size)


@pytest.mark.parametrize("repeats", [0, 1.5, float("nan")])
def test_a_stream_runs_a_whole_number_of_times(repeats: int) -> None:
    with pytest.raises(ConfigError, match="repeats is"):
        run_stream(Drive(Ssd.paper()), Stream("x", ()), repeats=repeats)


def test_warm_drives_hold_something_in_every_page_and_count_from_zero() -> None:
    for how in ("sequential", "random"):
        drive = warm_drive(SSD, how)
        assert drive.read(0, SSD.exported_pages).read_pages == SSD.exported_pages
        assert drive.work().programmed_pages == 0
    assert warm_drive(SSD, "none").read(0, SSD.exported_pages).read_pages == 0


def test_a_random_warm_up_is_the_same_each_time() -> None:
    first, second = (warm_drive(SSD, "random").places().tolist() for _ in range(2))

    assert first == second != warm_drive(SSD).places().tolist()


def test_an_unknown_warm_up_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="warm-up is 'hot'; it must be one of sequential, random, none"):
        warm_drive(SSD, "hot")


def test_a_stream_of_files_has_a_rate_of_its_own() -> None:
    """Ten pages every half day, the second file every time: 10,240 bytes a day."""
    stream = stream_of("write,a,5120", "write,b,5120")
    result = run_stream(Drive(SSD), stream, repeats=2)

    assert written_per_day(stream, result, 43_200.0, repeats=2) == pytest.approx(2 * 5_120)
    with pytest.raises(ConfigError, match="writes no files"):
        written_per_day(stream_of("write_pages,0"), result, 1.0)
    with pytest.raises(ConfigError, match="it must be finite and above zero"):
        written_per_day(stream, result, float("nan"))
