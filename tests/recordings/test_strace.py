"""Logs of strace become what the program did, whichever way it came to its files.

logs/*.strace were really written by strace 6.1 while this ran in /tmp/example, a is "data/a b.bin" of 20,000 bytes
and b "data/é<1>.bin" of 6,000: write both; open a, read 5,000; dup, read 5,000 there; seek to 100, read 10; pread
100 at 9,000; preadv 10 + 20 at 4,090; readv 10 + 20; in a forked child read 7, then read 8; in a thread read all of
b; map a; twice write 10,000 to saves/unfinished and rename it to saves/last.pt; append 8 to saves/log.txt and pwrite
8 more at 0 (which appends); rename saves to old; copy_file_range 9,000 from 1,000 of a into copy; remove copy; write
5 into another copy; enter data, read 3 of "a b.bin"; in another child, exec `cat "a b.bin"`. What Python and cat read
to start was cut out, and all that came before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.errors import FormatError
from penstock.recordings.blocks import Access
from penstock.recordings.strace import StraceReader

LOGS = Path(__file__).with_name("logs")
A, B = "/tmp/example/data/a b.bin", "/tmp/example/data/é<1>.bin"
R, W, M = Access.READ, Access.WRITE, Access.MAP
#: access, file, offset, bytes, and which process: the training, its forked child, or cat.
STORY = [
    (W, A, 0, 20_000, "training"),
    (W, B, 0, 6_000, "training"),
    (R, A, 0, 5_000, "training"),
    (R, A, 5_000, 5_000, "training"),
    (R, A, 100, 10, "training"),
    (R, A, 9_000, 100, "training"),
    (R, A, 4_090, 30, "training"),
    (R, A, 110, 30, "training"),
    (R, A, 140, 7, "child"),
    (R, A, 147, 8, "training"),
    (R, B, 0, 6_000, "training"),
    (M, A, 0, 20_000, "training"),
    (W, "/tmp/example/saves/last.pt", 0, 10_000, "training"),
    (W, "/tmp/example/old/last.pt", 0, 10_000, "training"),
    (W, "/tmp/example/old/log.txt", 0, 8, "training"),
    (W, "/tmp/example/old/log.txt", 8, 8, "training"),
    (R, A, 1_000, 9_000, "training"),
    (W, "/tmp/example/copy", 0, 9_000, "training"),
    (W, "/tmp/example/copy", 0, 5, "training"),
    (R, A, 0, 3, "training"),
    (R, A, 0, 20_000, "cat"),
]
Row = tuple[Access, str, int, int, int]


def followed(lines: list[str], folder: str | None = None) -> tuple[StraceReader, list[Row], list[float]]:
    """Return the reader, its rows as (access, path, offset, bytes, process), and their times."""
    reader = StraceReader("run.strace", folder)
    for line in lines:
        reader.feed(line)
    rows, names = reader.take()
    told = [
        (
            Access(row["access"]),
            names[int(row["file"])],
            int(row["offset"]),
            int(row["bytes"]),
            int(row["process"]),
        )
        for row in rows
    ]
    return reader, told, rows["time"].tolist()


@pytest.mark.parametrize(
    ("log", "folder", "pids"),
    [
        ("paths.strace", None, {"training": 28112, "child": 28153, "cat": 28155}),
        ("numbers.strace", "/tmp/example", {"training": 28162, "child": 28203, "cat": 28205}),
    ],
)
def test_descriptors_are_followed_through_forks_threads_duplicates_and_renames(
    log: str, folder: str | None, pids: dict[str, int]
) -> None:
    lines = (LOGS / log).read_text("utf-8").splitlines()

    reader, rows, times = followed(lines, folder)

    assert rows == [(*what, pids[who]) for *what, who in STORY]
    # Two saves, two copies: files of one name after each other are not one file.
    assert reader.take()[0].size == 0
    assert times == sorted(times)
    assert 0.0 < times[-1] < 1.0


def test_only_what_the_log_does_not_tell_is_left_out_and_counted() -> None:
    lines = (LOGS / "numbers.strace").read_text("utf-8").splitlines()

    reader, _, _ = followed(lines, "/tmp/example")

    assert reader.unresolved == 1  # cat's standard output, which no line opened


def test_a_descriptor_used_again_unseen_is_told_by_its_path() -> None:
    """Sockets and pipes are not traced, nor is close: number 3 is another thing each time."""
    _, rows, _ = followed(
        [
            '7 openat(AT_FDCWD</w>, "a", O_RDONLY) = 3</w/a>',
            '7 read(3</w/a>, ""..., 10) = 10',
            '7 read(3<socket:[1234]>, ""..., 10) = 10',
            '7 read(3</w/b>, ""..., 10) = 6',
            '7 read(3</w/b>, ""..., 10) = 4',
        ]
    )

    assert rows == [(R, "/w/a", 0, 10, 7), (R, "/w/b", 0, 6, 7), (R, "/w/b", 6, 4, 7)]


def test_calls_of_two_threads_that_overlap_count_when_they_return() -> None:
    _, rows, times = followed(
        [
            '7 100.0 openat(AT_FDCWD</w>, "a", O_RDONLY) = 3</w/a>',
            "7 100.1 clone3({flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_THREAD, exit_signal=0} <unfinished ...>",
            "8 100.2 read(3</w/a>,  <unfinished ...>",
            "7 100.3 <... clone3 resumed>, 88) = 8",
            '7 100.4 read(3</w/a>, ""..., 5) = 5',
            '8 100.5 <... read resumed>""..., 10) = 10',
            "8 100.6 +++ exited with 0 +++",
            "7 100.7 read(3</w/a>,  <unfinished ...>",
            "7 100.8 +++ killed by SIGKILL +++",
        ]
    )

    assert rows == [(R, "/w/a", 0, 5, 7), (R, "/w/a", 5, 10, 7)]
    assert times == pytest.approx([0.4, 0.5])


def test_threads_share_descriptors_and_processes_only_their_positions() -> None:
    _, rows, _ = followed(
        [
            "7 clone(child_stack=0x7f, flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_THREAD) = 8",
            '8 open("/w/a", O_RDONLY) = 3',
            '7 read(3, ""..., 10) = 10',
            "7 clone(child_stack=NULL, flags=SIGCHLD) = 9",
            '9 read(3, ""..., 10) = 10',
            '9 open("/w/b", O_RDONLY) = 4',
            '7 open("/w/c", O_RDONLY) = 4',
            '8 read(4, ""..., 10) = 10',
            '9 read(4, ""..., 10) = 10',
            '8 read(3, ""..., 10) = 10',
        ]
    )

    assert rows == [
        (R, "/w/a", 0, 10, 7),
        (R, "/w/a", 10, 10, 9),
        (R, "/w/c", 0, 10, 7),
        (R, "/w/b", 0, 10, 9),
        (R, "/w/a", 20, 10, 7),
    ]


def test_a_child_that_appears_before_its_parents_call_returns_has_the_parents_files() -> None:
    _, rows, _ = followed(
        [
            '7 open("/w/a", O_RDONLY|O_CLOEXEC) = 3',
            '7 open("/w/b", O_RDONLY) = 4',
            '7 read(3, "..."..., 10) = 10',
            "7 vfork( <unfinished ...>",
            '8 read(3, "..."..., 10) = 10',
            '8 execve("/bin/cat", ["cat"], 0x7ffc /* 9 vars */) = 0',
            '8 read(3, "from a pipe"..., 10) = 10',
            '8 read(4, "..."..., 10) = 10',
            "7 <... vfork resumed>) = 8",
            '7 read(3, "..."..., 10) = 10',
        ]
    )

    assert rows == [
        (R, "/w/a", 0, 10, 7),
        (R, "/w/a", 10, 10, 8),
        (R, "/w/b", 0, 10, 8),
        (R, "/w/a", 20, 10, 7),
    ]


@for_each(
    "opening", ["", "12:34:56 ", "12:34:56.789012 ", "1700000000.123456 ", "[pid  4711] ", "4711  12:34:56 "]
)
def test_lines_are_read_however_strace_was_asked_to_begin_them(opening: str) -> None:
    lines = ['openat(AT_FDCWD, "/w/a", O_RDONLY) = 3', 'read(3, "a) = 7, \\"b"..., 9)  = 9 <0.000012>']

    _, rows, _ = followed([opening + line for line in lines])

    assert rows == [(R, "/w/a", 0, 9, 4711 if "4711" in opening else 0)]


def test_clocks_without_a_date_go_on_over_midnight() -> None:
    _, _, times = followed(
        [
            '23:59:59 openat(AT_FDCWD, "/w/a", O_RDONLY) = 3',
            '23:59:59 read(3, "", 9) = 9',
            '00:00:01 read(3, "", 9) = 9',
            '00:00:02 read(3, "", 9) = 9',
        ]
    )

    assert times == [0.0, 2.0, 3.0]


def test_what_is_no_file_and_what_failed_is_no_reference() -> None:
    reader, rows, _ = followed(
        [
            '7 openat(AT_FDCWD</w>, "/dev/urandom", O_RDONLY) = 3</dev/urandom<char 1:9>>',
            '7 read(3</dev/urandom<char 1:9>>, ""..., 9) = 9',
            '7 openat(AT_FDCWD</w>, "a", O_RDONLY) = -1 ENOENT (No such file or directory)',
            '7 read(4</proc/1/stat>, ""..., 9) = 9',
            '7 read(5<pipe:[77]>, ""..., 9) = 9',
            '7 read(6</w/a>, ""..., 9) = -1 EAGAIN (Resource temporarily unavailable)',
            "7 read(6</w/a>, 0x7f, 9) = ? ERESTARTSYS (To be restarted if SA_RESTART is set)",
            '7 read(6</w/a>, "", 9) = 0',
            '7 write(7</memfd:x (deleted)>, ""..., 9) = 9',
        ]
    )

    assert rows == []
    assert reader.unresolved == 0


def test_processes_with_an_io_uring_are_named_as_their_reads_are_not_seen() -> None:
    reader, _, _ = followed(["7 io_uring_setup(8, {flags=0}) = 3<anon_inode:[io_uring]>"])

    assert reader.rings == {7}


def test_two_names_that_are_exchanged_go_on_naming_their_files() -> None:
    _, rows, _ = followed(
        [
            '7 openat(AT_FDCWD</w>, "a", O_RDWR) = 3</w/a>',
            '7 openat(AT_FDCWD</w>, "d/b", O_RDWR) = 4</w/d/b>',
            '7 renameat2(AT_FDCWD</w>, "a", AT_FDCWD</w>, "d/b", RENAME_EXCHANGE) = 0',
            '7 read(3</w/d/b>, ""..., 5) = 5',
            '7 read(4</w/a>, ""..., 6) = 6',
        ]
    )

    assert rows == [(R, "/w/d/b", 0, 5, 7), (R, "/w/a", 0, 6, 7)]


@for_each("line", ["", "hello", "7 read(3</w/a>, ", "7 read(3) 9", "12,x read(3) = 1"])
def test_a_line_that_is_not_straces_is_named_by_its_number(line: str) -> None:
    with pytest.raises(FormatError, match=r"run\.strace, line 2: .* is no line of strace's"):
        followed(["7 +++ exited with 0 +++", line])
