"""The model of a disk: what may be lost, and what may not, is what POSIX says; read from logs that can be read here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.checkpoint.crash.power import SECTOR_BYTES, CrashState, state_at, states
from tests.checkpoint.crash.recording import Recording
from tests.for_each import for_each

Files = dict[str, bytes | None]


def recorded(tmp_path: Path, *lines: str) -> Recording:
    """Return the recording of calls, given as strace prints them but for what it prints in hexadecimal."""

    def in_hexadecimal(text: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in text.encode())

    log = tmp_path / "log"
    with log.open("w") as file:
        for line in lines:
            if line.startswith("REPORT "):
                packet = json.dumps({"saved": int(line.removeprefix("REPORT "))})
                file.write(
                    f'7 sendto(8, "{in_hexadecimal(packet)}", {len(packet)}, 0, NULL, 0) = {len(packet)}\n'
                )
                continue
            thread, _, call = line.replace("TOP", "/disk").rpartition("| ")
            call = re.sub(r'"([^"]*)"', lambda found: f'"{in_hexadecimal(found[1])}"', call)
            call = re.sub(r"(?<=[\dD])<(/[^>]*)>", lambda found: f"<{in_hexadecimal(found[1])}>", call)
            file.write(f"{thread or '7'} {call}\n")
    recording = Recording(Path("/disk"))
    recording.feed(log)
    return recording


def looks(state: CrashState) -> Files:
    return dict(state.entries())


def every_look(recording: Recording, after: int | None = None) -> list[Files]:
    """Return what the disk may show: after so many operations, or at the end."""
    after = len(recording.operations) if after is None else after
    return [
        looks(state)
        for state in (state_at(recording, 0, index) for index in range(1_000))
        if state.after == after
    ]


CREATE = 'openat(AT_FDCWD</here>, "TOP/a", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0666) = 3</disk/a>'
WRITE = 'write(3</disk/a>, "words", 5) = 5'
SYNC = "fsync(3</disk/a>) = 0"
OPEN_FOLDER = 'openat(AT_FDCWD</here>, "TOP", O_RDONLY|O_CLOEXEC|O_DIRECTORY) = 4</disk>'
SYNC_FOLDER = "fsync(4</disk>) = 0"


def test_what_was_synced_with_its_name_is_always_there(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CREATE, WRITE, SYNC, OPEN_FOLDER, SYNC_FOLDER)

    assert {str(look) for look in every_look(recording)} == {"{'a': b'words'}"}


def test_a_synced_file_may_lose_its_name(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CREATE, WRITE, SYNC)

    assert {str(look) for look in every_look(recording)} == {"{}", "{'a': b'words'}"}


def test_a_name_may_be_there_without_the_bytes(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CREATE, WRITE, OPEN_FOLDER, SYNC_FOLDER)

    contents = [look["a"] for look in every_look(recording)]

    assert {b"", bytes(5), b"words"} <= set(contents)
    assert all(content in (b"", bytes(5), b"words") or len(content or b"") == 5 for content in contents)


def test_a_write_is_torn_between_sectors(tmp_path: Path) -> None:
    text = "x" * (3 * SECTOR_BYTES - 100)
    recording = recorded(
        tmp_path,
        CREATE,
        f'pwrite64(3</disk/a>, "{text}", {len(text)}, 100) = {len(text)}',
        OPEN_FOLDER,
        SYNC_FOLDER,
    )

    contents = {look["a"] or b"" for look in every_look(recording)}

    torn = {content for content in contents if content.startswith(bytes(SECTOR_BYTES))}
    assert any(content[SECTOR_BYTES : 2 * SECTOR_BYTES] == b"x" * SECTOR_BYTES for content in torn)
    for content in contents:
        if content:
            assert content[:100] == bytes(100)
            assert len(content) == 3 * SECTOR_BYTES


def test_of_two_writes_the_later_may_be_the_only_one(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path, CREATE, WRITE, 'write(3</disk/a>, " more", 5) = 5', OPEN_FOLDER, SYNC_FOLDER
    )

    assert bytes(5) + b" more" in [look["a"] for look in every_look(recording)]


def test_a_rename_is_done_or_not_and_may_precede_the_bytes(tmp_path: Path) -> None:
    rename = 'rename("TOP/a", "TOP/b") = 0'
    recording = recorded(tmp_path, CREATE, OPEN_FOLDER, SYNC_FOLDER, WRITE, rename)

    seen = every_look(recording)

    assert {tuple(look) for look in seen} == {("a",), ("b",)}
    assert {"b": b""} in seen
    assert {"a": b"words"} in seen


def test_what_is_removed_from_a_renamed_folder_may_be_gone_before_the_folder_is(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        'mkdir("TOP/s", 0777) = 0',
        'openat(AT_FDCWD</here>, "TOP/s/a", O_WRONLY|O_CREAT, 0666) = 3</disk/s/a>',
        "fsync(3</disk/s/a>) = 0",
        'openat(AT_FDCWD</here>, "TOP/s", O_RDONLY) = 5</disk/s>',
        "fsync(5</disk/s>) = 0",
        OPEN_FOLDER,
        SYNC_FOLDER,
        'rename("TOP/s", "TOP/gone") = 0',
        'unlinkat(5</disk/gone>, "a", 0) = 0',
    )

    seen = every_look(recording)

    assert {"s": None} in seen
    assert {"s": None, "s/a": b""} in seen
    assert {"gone": None, "gone/a": b""} in seen


def test_a_sync_does_not_cover_what_another_thread_wrote_while_it_ran(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        CREATE,
        OPEN_FOLDER,
        SYNC_FOLDER,
        "7| fsync(3</disk/a> <unfinished ...>",
        f"8| {WRITE}",
        "7| <... fsync resumed>) = 0",
    )

    assert {"a": b""} in every_look(recording)


def test_a_number_may_be_anothers_before_its_close_has_returned(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        CREATE,
        "7| close(3</disk/a> <unfinished ...>",
        '8| openat(AT_FDCWD</here>, "TOP/b", O_WRONLY|O_CREAT, 0666) = 3</disk/b>',
        "7| <... close resumed>) = 0",
        '8| write(3</disk/b>, "words", 5) = 5',
        "8| fsync(3</disk/b>) = 0",
        OPEN_FOLDER,
        SYNC_FOLDER,
    )

    assert {str(look) for look in every_look(recording)} == {"{'a': b'', 'b': b'words'}"}


def test_a_failed_sync_promises_nothing(tmp_path: Path) -> None:
    failed = "fsync(3</disk/a>) = -1 EIO (Input/output error) (INJECTED)"
    recording = recorded(tmp_path, CREATE, OPEN_FOLDER, SYNC_FOLDER, WRITE, failed)

    assert {"a": b""} in every_look(recording)


def test_positions_follow_seeks_appends_and_duplicates(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        CREATE,
        WRITE,
        "dup(3</disk/a>) = 9</disk/a>",
        "lseek(9</disk/a>, 1, SEEK_SET) = 1",
        'writev(3</disk/a>, [{iov_base="O", iov_len=1}, {iov_base="RD", iov_len=2}], 2) = 3',
        'openat(5</disk>, "a", O_WRONLY|O_APPEND) = 6</disk/a>',
        'write(6</disk/a>, "!", 1) = 1',
        "close(3</disk/a>) = 0",
        "fsync(9</disk/a>) = 0",
        OPEN_FOLDER,
        SYNC_FOLDER,
    )

    assert every_look(recording)[0] == {"a": b"wORDs!"}


def test_what_was_cut_off_may_be_back(tmp_path: Path) -> None:
    cut = 'openat(AT_FDCWD</here>, "TOP/a", O_WRONLY|O_CREAT|O_TRUNC) = 3</disk/a>'
    recording = recorded(
        tmp_path, CREATE, WRITE, SYNC, OPEN_FOLDER, SYNC_FOLDER, cut, 'write(3</disk/a>, "W", 1) = 1'
    )

    contents = {look["a"] for look in every_look(recording)}

    assert {b"words", b"", b"W", b"Words"} <= contents


def test_states_can_be_seen_again_and_are_not_alike(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CREATE, WRITE, WRITE, 'rename("TOP/a", "TOP/b") = 0')

    shown = list(states(recording, 20, seed=3))

    assert len({str(sorted(looks(state).items())) for state in shown}) == len(shown) > 8
    for state in shown:
        again = state_at(recording, 3, state.index)
        assert (again.after, looks(again), str(again)) == (state.after, looks(state), str(state))


def test_a_state_is_told_by_what_survived(tmp_path: Path) -> None:
    recording = recorded(tmp_path, CREATE, "REPORT 7", WRITE)

    shown = (state_at(recording, 0, index) for index in range(1_000))
    told = str(next(state for state in shown if state.after == 3 and looks(state) == {"a": b""}))

    assert "power cut after operation 3" in told
    assert "reported as saved: [7]" in told
    assert "  +    1 create a" in told
    assert "  -    3 write 5 bytes at 0 of a" in told


@for_each(
    "line",
    [
        'symlink("TOP/a", "TOP/b") = 0',
        'renameat2(AT_FDCWD</here>, "TOP/a", AT_FDCWD</here>, "TOP/b", RENAME_EXCHANGE) = 0',
        "mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 3</disk/a>, 0) = 0x7f0000000000",
        "fallocate(3</disk/a>, FALLOC_FL_PUNCH_HOLE|FALLOC_FL_KEEP_SIZE, 0, 4096) = 0",
        'rename("TOP/a", "/elsewhere") = 0',
        'rename("a", "b") = 0',
        "fork() = 9",
        "io_uring_setup(8, {}) = 5",
        "copy_file_range(5</else>, NULL, 3</disk/a>, NULL, 100, 0) = 100",
    ],
)
def test_a_call_that_the_model_does_not_know_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(NotImplementedError, match="not modelled"):
        recorded(tmp_path, CREATE, line)


def test_calls_outside_of_the_folder_are_nobodys_business(tmp_path: Path) -> None:
    recording = recorded(
        tmp_path,
        'openat(AT_FDCWD</here>, "b", O_WRONLY|O_CREAT) = 3</here/b>',
        'write(3</here/b>, "x", 1) = 1',
        'rename("/here/b", "/here/c") = 0',
        'unlink("/disk-other/x") = 0',
    )

    assert recording.operations == []
