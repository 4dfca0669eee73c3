"""What strace printed, followed through forks, threads, duplicated descriptors and seeks, to files and offsets.

strace prints for each call its descriptor and the bytes moved, not where in the file: the position belongs to
the open file description, which processes share after a fork and descriptors after a dup. So these are kept
here as the kernel keeps them: a table of descriptors per process (shared by its threads), each entry pointing
at a description with a file and a position.

Works best on a log with paths (`strace -f -y`): a descriptor whose path is not that of the description kept for
it was closed and used again by something that was not traced, and counts as newly opened.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import FormatError
from penstock.recordings.blocks import REFERENCE, Access, Rows

#: The calls that are needed to follow a process; those of the second line are not on every architecture.
CALLS = (
    "openat,openat2,read,pread64,readv,preadv,preadv2,write,pwrite64,writev,pwritev,pwritev2,lseek,mmap,dup,dup3,"
    "fcntl,sendfile,copy_file_range,renameat,renameat2,unlinkat,chdir,fchdir,clone,clone3,execve,io_uring_setup,"
    "?open,?creat,?dup2,?rename,?unlink,?fork,?vfork,?mmap2,?_llseek"
)

_LINE = re.compile(
    r"(?:\[pid +(?P<tid>\d+)\] +|(?P<pid>\d+) +)?"
    r"(?:(?P<seconds>\d+\.\d+)|(?P<hours>\d\d):(?P<minutes>\d\d):(?P<of_minute>\d\d(?:\.\d+)?))? *"
    r"(?P<body>.*)"
)
_CALL = re.compile(r"(?P<name>\w+)\((?P<args>.*)\) += (?P<value>-?\d+|0x[0-9a-f]+|\?)(?P<rest>.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>,? ?")
_UNFINISHED = " <unfinished ...>"
_CREATES = re.compile(r"(?:clone|clone3|fork|vfork)\(")
#: Lines that carry no call: signals, the strace command's own messages.
_NO_CALL = re.compile(r"--- |\[ Process |strace: |\?\?\?\(")
_DESCRIPTOR = re.compile(r"(-?\d+|AT_FDCWD)(?:<([^<>]*)(?:<[^<>]*>)?>(?:\(deleted\))?)?")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-f]{2}|.)")
_CODES = {"n": "\n", "t": "\t", "r": "\r", "v": "\v", "f": "\f", "a": "\a", "b": "\b"}
_LAST_NUMBER = re.compile(r", (-?\d+|0x[0-9a-f]+)$")
_OFFSET_ARGUMENT = re.compile(r"\[(\d+)\](?: => \[\d+\])?|NULL")

_READS_AT_POSITION = frozenset(("read", "readv"))
_WRITES_AT_POSITION = frozenset(("write", "writev"))
_POSITIONED = {
    "pread64": Access.READ,
    "pread": Access.READ,
    "preadv": Access.READ,
    "preadv2": Access.READ,
    "pwrite64": Access.WRITE,
    "pwrite": Access.WRITE,
    "pwritev": Access.WRITE,
    "pwritev2": Access.WRITE,
}
#: Files that are none: kernel's, terminals, shared memory.
_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV", "/anon_hugepage", "/[aio]")
_HALF_A_DAY, _DAY = 43_200.0, 86_400.0


@dataclass(slots=True)
class _Description:
    """An open file description: what descriptors point at."""

    #: None where it is no file: a pipe, a socket, a terminal.
    file: int | None
    position: int = 0
    appends: bool = False
    #: As it was opened; for all descriptors of it, though the kernel keeps it for each.
    closes_on_exec: bool = False


@dataclass(slots=True)
class _Task:
    """A thread, as the kernel sees one: tables that it may share with others."""

    process: int
    descriptors: dict[int, _Description] = field(default_factory=dict)
    #: One element: the folder that relative names begin at, None where it is not known.
    folder: list[str | None] = field(default_factory=lambda: [None])


class StraceReader:
    """Turns the lines of a log into rows, in the order in which the calls returned.

    name: of the log, for messages.
    folder: where the traced command was started; relative names of a log without paths begin there.
    Times are those printed, less the first; of a call that another process's line came into, when it returned.
    A `process` is a process, not a thread, where the log shows how threads came about.
    """

    def __init__(self, name: str, folder: str | None = None) -> None:
        self._name = name
        self._folder = folder
        #: Lines that were fed.
        self.lines = 0
        #: Reads and writes of which the log does not tell the file.
        self.unresolved = 0
        #: Processes that set up an io_uring, whose reads are no system calls.
        self.rings: set[int] = set()
        self._tasks: dict[int, _Task] = {}
        #: First half of a call that is not finished, by thread.
        self._halves: dict[int, str] = {}
        #: Threads in the middle of making another, in the order of the log, which may show the child first.
        self._creating: list[int] = []
        #: Children that appeared before their call returned, with the thread taken to be the parent.
        self._adopted: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._ends: dict[int, int] = {}
        self._changed: dict[int, str] = {}
        self._rows: list[tuple[float, int, int, int, int, int]] = []
        self._origin: float | None = None
        self._days = 0.0
        self._now = 0.0

    def take(self) -> tuple[Rows, dict[int, str]]:
        """Return the rows since the last call, and the names of files that are new or changed since."""
        rows, names = np.array(self._rows, REFERENCE), self._changed
        self._rows, self._changed = [], {}
        return rows, names

    @property
    def pending(self) -> int:
        """How many rows wait to be taken."""
        return len(self._rows)

    def feed(self, line: str) -> None:
        """Take the next line, without its newline.

        Raises: FormatError, naming log and line, when it is none of strace's.
        """
        self.lines += 1
        match = _LINE.fullmatch(line.rstrip())
        body = match["body"] if match else ""
        if not match or not body:
            raise self._malformed(line)
        tid = int(match["tid"] or match["pid"] or 0)
        self._tick(match)
        if body.startswith("+++ "):
            self._tasks.pop(tid, None)
            self._halves.pop(tid, None)
            return
        if resumed := _RESUMED.match(body):
            half = self._halves.pop(tid, None)
            if (
                half is None
            ):  # its first half was before the log began, or the thread was taken over by an exec
                return
            body = half + body[resumed.end() :]
        if body.endswith(_UNFINISHED):
            half = body.removesuffix(_UNFINISHED)
            self._task(tid)
            self._halves[tid] = half
            if _CREATES.match(half):
                self._creating.append(tid)
            return
        call = _CALL.fullmatch(body)
        if call is None:
            if _NO_CALL.match(body):
                return
            raise self._malformed(line)
        self._take_call(tid, call["name"], call["args"], call["value"], call["rest"])

    def _malformed(self, line: str) -> FormatError:
        shown = line if len(line) <= 100 else line[:97] + "..."
        return FormatError(
            f"{self._name}, line {self.lines}: {shown!r} is no line of strace's: give a log as strace -f -ttt -y -o "
            "writes it"
        )

    def _tick(self, match: re.Match[str]) -> None:
        if match["seconds"]:
            now = float(match["seconds"])
        elif match["hours"]:
            now = int(match["hours"]) * 3600.0 + int(match["minutes"]) * 60.0 + float(match["of_minute"])
            if self._origin is not None and now + self._days + self._origin < self._now - _HALF_A_DAY:
                self._days += _DAY  # strace -t prints no date
            now += self._days
        else:
            return
        if self._origin is None:
            self._origin = -now
        self._now = now + self._origin

    def _task(self, tid: int) -> _Task:
        task = self._tasks.get(tid)
        if task is None:
            if self._creating:
                parent = self._creating.pop(0)
                self._adopted[tid] = parent
                task = self._make_child(parent, tid, self._halves.get(parent, ""))
            else:
                task = self._tasks[tid] = _Task(tid, folder=[self._folder])
        return task

    def _make_child(self, parent: int, tid: int, args: str) -> _Task:
        """Enter a new thread or process, with what the flags of its making say that it shares."""
        of = self._task(parent)
        child = _Task(
            of.process if "CLONE_THREAD" in args else tid,
            of.descriptors if "CLONE_FILES" in args else dict(of.descriptors),
            of.folder if "CLONE_FS" in args else list(of.folder),
        )
        self._tasks[tid] = child
        return child

    def _take_call(self, tid: int, name: str, args: str, value: str, rest: str) -> None:
        if name in ("clone", "clone3", "fork", "vfork"):
            self._created(tid, args, value)
            return
        task = self._task(tid)
        if value == "?" or value.startswith("-"):
            return
        result = int(value, 0)
        if name in _READS_AT_POSITION:
            self._move(task, Access.READ, args, result, None)
        elif name in _WRITES_AT_POSITION:
            self._move(task, Access.WRITE, args, result, None)
        elif name in _POSITIONED:
            if name.endswith("v2"):  # its flags come last
                args = args.rpartition(", ")[0]
            offset = _LAST_NUMBER.search(args)
            at = int(offset[1], 0) if offset else -1
            self._move(task, _POSITIONED[name], args, result, None if at < 0 else at)
        elif handler := _HANDLERS.get(name):
            handler(self, task, args, result, rest)

    def _created(self, tid: int, args: str, value: str) -> None:
        if tid in self._creating:
            self._creating.remove(tid)
        if value == "?" or value.startswith("-") or value == "0":
            return
        child = int(value)
        parent = self._adopted.pop(child, None)
        if parent is None:
            self._make_child(tid, child, args)
        elif parent != tid and child in self._tasks:
            # Two were being made at a time, and each was taken for the other's: keep what it opened since.
            own = self._tasks[child].descriptors
            made = self._make_child(tid, child, args)
            if "CLONE_FILES" not in args:
                made.descriptors.update(own)

    def _description(self, task: _Task, argument: str) -> _Description | None:
        """Return what a descriptor, printed as an argument or a result, points at; None where that is unknown."""
        match = _DESCRIPTOR.match(argument)
        if match is None or match[1] == "AT_FDCWD":
            return None
        number = int(match[1])
        known = task.descriptors.get(number)
        if match[2] is None:
            return known
        path = _unescaped(match[2])
        is_gone = match[0].endswith("(deleted)") or match[2].endswith(" (deleted)")
        if known is not None and (is_gone or self._is_at(known, path)):
            return known
        known = task.descriptors[number] = _Description(self._file(path))
        return known

    def _is_at(self, description: _Description, path: str) -> bool:
        if description.file is None:
            return not _is_file(path)
        return self._names[description.file] == path

    def _file(self, path: str) -> int | None:
        if not _is_file(path):
            return None
        number = self._numbers.get(path)
        if number is None:
            number = self._numbers[path] = len(self._names)
            self._names.append(path)
            self._changed[number] = path
        return number

    def _path(self, task: _Task, folder: str, quoted: str) -> str:
        """Return a name as a path: absolute where the folder it begins at is known."""
        name = _unescaped(quoted)
        if name.startswith("/"):
            return os.path.normpath(name)
        match = _DESCRIPTOR.match(folder)
        if match and match[2] is not None:
            base: str | None = _unescaped(match[2])
        elif match and match[1] != "AT_FDCWD":
            base = None
        else:
            base = task.folder[0]
        return os.path.normpath(os.path.join(base, name) if base else name)

    def _add(self, task: _Task, access: Access, file: int, offset: int, size: int) -> None:
        self._rows.append((self._now, offset, size, file, task.process, access))
        if access == Access.WRITE:
            self._ends[file] = max(self._ends.get(file, 0), offset + size)

    def _move(self, task: _Task, access: Access, argument: str, size: int, offset: int | None) -> None:
        """Note that a call moved `size` bytes: at an offset of its own, or at the position, which then moves on."""
        description = self._description(task, argument)
        if description is None:
            # Descriptors of a log without paths that were there before it: nearly always a terminal's or a pipe.
            self.unresolved += size > 0
            return
        if description.file is None or size == 0:
            return
        at = description.position if offset is None else offset
        if access == Access.WRITE and description.appends:
            at = max(self._ends.get(description.file, 0), description.position)
        if offset is None:
            description.position = at + size
        self._add(task, access, description.file, at, size)

    # -- Calls that move no bytes, or between two files ---------------------------------------------------------

    def _open(self, task: _Task, args: str, result: int, rest: str) -> None:
        quoted = _QUOTED.search(args)
        if quoted is None:
            return
        if (begin := _DESCRIPTOR.match(args)) and begin[1] == "AT_FDCWD" and begin[2] is not None:
            task.folder[0] = _unescaped(begin[2])
        flags = args[quoted.end() :]
        shown = _DESCRIPTOR.match(f"{result}{rest}")
        path = (
            _unescaped(shown[2])
            if shown and shown[2] is not None
            else self._path(task, args[: quoted.start()] or "AT_FDCWD", quoted[1])
        )
        file = None if "O_DIRECTORY" in flags or "O_PATH" in flags else self._file(path)
        task.descriptors[result] = _Description(file, 0, "O_APPEND" in flags, "O_CLOEXEC" in flags)

    def _seek(self, task: _Task, args: str, result: int, _rest: str) -> None:
        description = self._description(task, args)
        if description is not None:
            description.position = result
            if "SEEK_END" in args and description.file is not None and ", 0, " in args:
                self._ends[description.file] = max(self._ends.get(description.file, 0), result)

    def _map(self, task: _Task, args: str, _result: int, _rest: str) -> None:
        parts = args.rsplit(", ", 2)
        if len(parts) != 3 or parts[1].startswith("-1"):
            return
        description = self._description(task, parts[1])
        length = args.split(", ", 2)[1]
        if description is not None and description.file is not None and int(length, 0) > 0:
            self._add(task, Access.MAP, description.file, int(parts[2], 0), int(length, 0))

    def _duplicate(self, task: _Task, args: str, result: int, _rest: str) -> None:
        description = self._description(task, args)
        if description is None:
            task.descriptors.pop(result, None)
        else:
            task.descriptors[result] = description

    def _control(self, task: _Task, args: str, result: int, rest: str) -> None:
        if "F_DUPFD" in args:
            self._duplicate(task, args, result, rest)

    def _close(self, task: _Task, args: str, _result: int, _rest: str) -> None:
        match = _DESCRIPTOR.match(args)
        if match and match[1] != "AT_FDCWD":
            task.descriptors.pop(int(match[1]), None)

    def _rename(self, task: _Task, args: str, _result: int, _rest: str) -> None:
        names = list(_QUOTED.finditer(args))
        if len(names) != 2:
            return
        old = self._path(task, args[: names[0].start()] or "AT_FDCWD", names[0][1])
        between = args[names[0].end() : names[1].start()].strip(", ")
        new = self._path(task, between or "AT_FDCWD", names[1][1])
        moved = self._below(old, new)
        if "RENAME_EXCHANGE" in args:
            moved += self._below(new, old)  # else what was there is no longer found by its name
        for path, _, _ in moved:
            del self._numbers[path]
        for _, number, path in moved:
            self._numbers[path] = number
            self._names[number] = path
            self._changed[number] = path

    def _below(self, old: str, new: str) -> list[tuple[str, int, str]]:
        """Return the files at or below a path: path, number, and the path once `old` is called `new`."""
        if old in self._numbers:
            return [(old, self._numbers[old], new)]
        inside = old + "/"
        return [
            (path, number, new + path[len(old) :])
            for path, number in self._numbers.items()
            if path.startswith(inside)
        ]

    def _remove(self, task: _Task, args: str, _result: int, _rest: str) -> None:
        quoted = _QUOTED.search(args)
        if quoted is not None:
            self._numbers.pop(self._path(task, args[: quoted.start()] or "AT_FDCWD", quoted[1]), None)

    def _enter(self, task: _Task, args: str, _result: int, _rest: str) -> None:
        quoted = _QUOTED.search(args)
        if quoted is not None:
            task.folder[0] = self._path(task, "AT_FDCWD", quoted[1])
        elif (match := _DESCRIPTOR.match(args)) and match[2] is not None:
            task.folder[0] = _unescaped(match[2])

    def _send(self, task: _Task, args: str, result: int, _rest: str) -> None:
        """sendfile(out, in, [offset] or NULL, count)."""
        parts = args.split(", ", 2)
        if len(parts) == 3:
            offset = _OFFSET_ARGUMENT.match(parts[2])
            self._move(task, Access.READ, parts[1], result, int(offset[1]) if offset and offset[1] else None)
            self._move(task, Access.WRITE, parts[0], result, None)

    def _copy_range(self, task: _Task, args: str, result: int, _rest: str) -> None:
        """copy_file_range(in, [offset] or NULL, out, [offset] or NULL, count, flags)."""
        parts = args.split(", ")
        if len(parts) >= 4:
            for place, access in ((0, Access.READ), (2, Access.WRITE)):
                offset = _OFFSET_ARGUMENT.match(parts[place + 1])
                self._move(
                    task, access, parts[place], result, int(offset[1]) if offset and offset[1] else None
                )

    def _execute(self, task: _Task, _args: str, _result: int, _rest: str) -> None:
        # A new program has a table of its own, also when its maker shared one (vfork).
        task.descriptors = {
            number: description
            for number, description in task.descriptors.items()
            if not description.closes_on_exec
        }

    def _ring(self, task: _Task, _args: str, _result: int, _rest: str) -> None:
        self.rings.add(task.process)


_HANDLERS = {
    "open": StraceReader._open,
    "openat": StraceReader._open,
    "openat2": StraceReader._open,
    "creat": StraceReader._open,
    "lseek": StraceReader._seek,
    "mmap": StraceReader._map,
    "dup": StraceReader._duplicate,
    "dup2": StraceReader._duplicate,
    "dup3": StraceReader._duplicate,
    "fcntl": StraceReader._control,
    "close": StraceReader._close,
    "rename": StraceReader._rename,
    "renameat": StraceReader._rename,
    "renameat2": StraceReader._rename,
    "unlink": StraceReader._remove,
    "unlinkat": StraceReader._remove,
    "chdir": StraceReader._enter,
    "fchdir": StraceReader._enter,
    "sendfile": StraceReader._send,
    "copy_file_range": StraceReader._copy_range,
    "execve": StraceReader._execute,
    "io_uring_setup": StraceReader._ring,
}


def _is_file(path: str) -> bool:
    return not path.startswith(_NO_FILES) and not re.match(r"\w+:\[", path) and "anon_inode:" not in path


def _unescaped(text: str) -> str:
    """Return a printed name as the operating system has it."""
    if "\\" not in text:
        return text

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "01234567":
            return chr(int(code, 8))
        if code[0] == "x" and len(code) == 3:
            return chr(int(code[1:], 16))
        return _CODES.get(code, code)

    # Each escape is one byte; text that strace left as it is, is ASCII.
    return os.fsdecode(_ESCAPE.sub(one, text).encode("latin-1", "replace"))
