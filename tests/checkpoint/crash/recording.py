r"""What a series of saves asked of the disk, in order, with every byte: read from a log of strace -f -y -xx.

penstock.recordings.strace follows descriptors to files and offsets; here the bytes matter, and the syncs, and the names
as they were, so this is a reader of its own for logs of one process (any number of threads) that began with no file
open. A call that could change a file in a way that is not modelled is refused, never skipped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: The folder that the store's folder is made in: there, and durable, from the beginning.
TOP = 0


@dataclass(frozen=True)
class Names:
    """A change of names: made at once, in one folder or two. From (folder, name) to what is now there, or nothing."""

    entries: tuple[tuple[int, str, int | None], ...]
    says: str

    @property
    def inodes(self) -> frozenset[int]:
        return frozenset(folder for folder, _, _ in self.entries)


@dataclass(frozen=True)
class Write:
    """Bytes written into a file."""

    inode: int
    offset: int
    data: bytes
    says: str

    @property
    def inodes(self) -> frozenset[int]:
        return frozenset([self.inode])


@dataclass(frozen=True)
class Resize:
    """A file cut or extended; grows: to at least the size, as fallocate does."""

    inode: int
    size: int
    grows: bool
    says: str

    @property
    def inodes(self) -> frozenset[int]:
        return frozenset([self.inode])


@dataclass(frozen=True)
class Sync:
    """What had been done to a file or folder (None: to all) when the call began is durable when it has returned.

    began: how many operations were over by then; another thread's may lie between.
    """

    inode: int | None
    began: int
    says: str


@dataclass(frozen=True)
class Report:
    """The process said that a step was saved (or that it was not: saved is None)."""

    saved: int | None
    says: str


Operation = Names | Write | Resize | Sync | Report


@dataclass(eq=False)
class _Description:
    """An open file description."""

    inode: int
    position: int = 0
    appends: bool = False
    syncs: bool = False


@dataclass
class _Call:
    """One line of the log, or two halves joined."""

    name: str
    arguments: str
    value: str
    began: int


_LINE = re.compile(r"(\d+) +(.*)", re.DOTALL)
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+|\?)(?:<.*>)?(?: .*)?", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>,? ?")
_DESCRIPTOR = re.compile(r"(-?\d+|AT_FDCWD)(?:<((?:\\x[0-9a-f]{2})*)>)?")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
#: Calls that change neither bytes nor names nor a position, and of which nothing is promised for a power cut.
_HARMLESS = re.compile(
    r"pread|stat|lstat|fstat|newfstatat|access|faccessat|readlink|chmod|fchmod|utimensat|flock|getdents|fadvise"
    r"|sync_file_range"
)


class Recording:
    """The operations on what is below a folder; feed it one log, or those of several processes one after the other."""

    def __init__(self, top: Path) -> None:
        self._top = os.path.realpath(top)
        self.operations: list[Operation] = []
        #: Which inodes are folders.
        self.folders = {TOP}
        self._entries: dict[int, dict[str, int]] = {TOP: {}}
        self._sizes: dict[int, int] = {}
        self._inodes = 1
        self._descriptors: dict[int, _Description] = {}

    @property
    def last_step(self) -> int:
        """Return the last step that was reported saved."""
        return max(
            each.saved for each in self.operations if isinstance(each, Report) and each.saved is not None
        )

    def feed(self, log: Path) -> None:
        """Take the log of a process that began with no file open and is over.

        Raises: NotImplementedError for a call that the model does not know, naming it.
        """
        self._descriptors = {}
        halves: dict[str, tuple[str, int]] = {}
        with log.open(encoding="latin-1") as lines:
            for line in lines:
                found = _LINE.match(line.rstrip("\n"))
                if found is None or found[2].startswith(("+++", "---", "strace: ")):
                    continue
                thread, text = found[1], found[2]
                began = len(self.operations)
                if resumed := _RESUMED.match(text):
                    half, began = halves.pop(thread)
                    text = half + text[resumed.end() :]
                if text.endswith("<unfinished ...>"):
                    if text.startswith("close("):
                        # Another thread may be given the number before this returns.
                        self._close(text)
                    halves[thread] = text.removesuffix("<unfinished ...>").rstrip(), began
                    continue
                if text.startswith("close("):
                    if not resumed:
                        self._close(text)
                    continue
                call = _CALL.fullmatch(text)
                if call is None:
                    raise NotImplementedError(f"no call can be read from {text[:300]!r}")
                if call[3] != "?" and not call[3].startswith("-"):
                    self._take(_Call(call[1], call[2], call[3], began))

    # -- Arguments --------------------------------------------------------------------------------------------

    def _take(self, call: _Call) -> None:
        if _HARMLESS.match(call.name):
            return
        handler = _HANDLERS.get(call.name)
        if handler is None:
            if self._top in _shown(call.arguments) or call.name in ("fork", "vfork", "io_uring_setup"):
                raise NotImplementedError(f"{call.name}({_shown(call.arguments)[:300]}) is not modelled")
            return
        handler(self, call)

    def _at(self, call: _Call, first: int = 0) -> tuple[int, str] | None:
        """Return folder and name of the path from an argument on, None where it is outside of what is recorded."""
        strings = list(_STRING.finditer(call.arguments))
        string = strings[first]
        path = os.fsdecode(_bytes(string[1]))
        if not path.startswith("/"):
            start = strings[first - 1].end() if first else 0
            base = _DESCRIPTOR.search(call.arguments, start, string.start())
            if base is None or base[2] is None:
                raise NotImplementedError(f"a name relative to an unknown folder ({path}) is not modelled")
            path = os.path.join(os.fsdecode(_bytes(base[2])), path)
        path = os.path.normpath(path)
        if path != self._top and not path.startswith(self._top + "/"):
            return None
        folder = TOP
        *above, name = path.removeprefix(self._top).strip("/").split("/")
        for part in above:
            folder = self._entries[folder][part]
        return folder, name

    def _look(self, at: tuple[int, str]) -> int | None:
        folder, name = at
        return TOP if not name else self._entries[folder].get(name)

    def _open_file(self, call: _Call) -> _Description | None:
        match = _DESCRIPTOR.match(call.arguments)
        assert match is not None, call
        description = self._descriptors.get(int(match[1]))
        is_inside = os.fsdecode(_bytes(match[2] or "")).startswith(self._top + "/")
        assert description is not None or not is_inside, (
            f"{_shown(call.arguments)[:200]} was opened by nobody"
        )
        return description

    def _new_inode(self, folder: bool) -> int:
        inode = self._inodes
        self._inodes += 1
        if folder:
            self.folders.add(inode)
            self._entries[inode] = {}
        else:
            self._sizes[inode] = 0
        return inode

    def _name_changes(self, says: str, *entries: tuple[int, str, int | None]) -> None:
        for folder, name, inode in entries:
            if inode is None:
                self._entries[folder].pop(name, None)
            else:
                self._entries[folder][name] = inode
        self.operations.append(Names(entries, says))

    def _path(self, folder: int, name: str = "") -> str:
        """Return how a folder's entry is called in messages."""
        if folder == TOP:
            return name or "."
        for above, entries in self._entries.items():
            for called, inode in entries.items():
                if inode == folder:
                    return self._path(above, called) + (f"/{name}" if name else "")
        return f"(removed {folder})/{name}"

    def _called(self, inode: int) -> str:
        for folder, entries in self._entries.items():
            for name, other in entries.items():
                if other == inode:
                    return self._path(folder, name)
        return "." if inode == TOP else f"(removed {inode})"

    # -- Calls ------------------------------------------------------------------------------------------------

    def _open(self, call: _Call) -> None:
        at = self._at(call)
        number = int(call.value)
        if at is None:
            self._descriptors.pop(number, None)
            return
        flags = call.arguments[next(iter(_STRING.finditer(call.arguments))).end() :]
        if "O_TMPFILE" in flags:
            raise NotImplementedError("O_TMPFILE is not modelled")
        inode = self._look(at)
        if inode is None:
            assert "O_CREAT" in flags or call.name == "creat", call
            inode = self._new_inode(folder=False)
            self._name_changes(f"create {self._path(*at)}", (*at, inode))
        elif "O_TRUNC" in flags or call.name == "creat":
            self._resize(inode, 0, False)
        self._descriptors[number] = _Description(
            inode, appends="O_APPEND" in flags, syncs="O_SYNC" in flags or "O_DSYNC" in flags
        )

    def _close(self, text: str) -> None:
        match = _DESCRIPTOR.search(text)
        assert match is not None, text
        self._descriptors.pop(int(match[1]), None)

    def _duplicate(self, call: _Call) -> None:
        if call.name == "fcntl" and "F_DUPFD" not in call.arguments:
            return
        description = self._open_file(call)
        self._descriptors.pop(int(call.value), None)
        if description is not None:
            self._descriptors[int(call.value)] = description

    def _seek(self, call: _Call) -> None:
        if description := self._open_file(call):
            description.position = int(call.value)

    def _read(self, call: _Call) -> None:
        if description := self._open_file(call):
            description.position += int(call.value)

    def _write(self, call: _Call) -> None:
        description = self._open_file(call)
        if description is None:
            return
        strings = list(_STRING.finditer(call.arguments))
        assert not any(string[2] for string in strings), "strace cut the bytes off"
        data = b"".join(_bytes(string[1]) for string in strings)[: int(call.value)]
        assert len(data) == int(call.value), call.name
        if call.name.startswith("p"):
            offset = int(call.arguments.rpartition(", ")[2], 0)
        else:
            if description.appends:
                description.position = self._sizes[description.inode]
            offset = description.position
            description.position += len(data)
        inode = description.inode
        called = self._called(inode)
        self.operations.append(Write(inode, offset, data, f"write {len(data)} bytes at {offset} of {called}"))
        self._sizes[inode] = max(self._sizes[inode], offset + len(data))
        if description.syncs:
            self.operations.append(Sync(inode, len(self.operations), f"(written through: {called})"))

    def _resize(self, inode: int, size: int, grows: bool) -> None:
        self.operations.append(Resize(inode, size, grows, f"resize {self._called(inode)} to {size}"))
        self._sizes[inode] = max(size, self._sizes[inode]) if grows else size

    def _truncate(self, call: _Call) -> None:
        size = int(call.arguments.rpartition(", ")[2], 0)
        if call.name == "truncate":
            at = self._at(call)
            inode = None if at is None else self._look(at)
        else:
            description = self._open_file(call)
            inode = None if description is None else description.inode
        if inode is not None:
            self._resize(inode, size, False)

    def _allocate(self, call: _Call) -> None:
        description = self._open_file(call)
        if description is None:
            return
        _, mode, offset, size = call.arguments.split(", ")
        if mode == "0":
            self._resize(description.inode, int(offset, 0) + int(size, 0), True)
        elif mode != "FALLOC_FL_KEEP_SIZE":
            raise NotImplementedError(f"fallocate with {mode} is not modelled")

    def _sync(self, call: _Call) -> None:
        if call.name in ("sync", "syncfs"):
            self.operations.append(Sync(None, call.began, call.name))
        elif description := self._open_file(call):
            inode = description.inode
            self.operations.append(Sync(inode, call.began, f"{call.name} {self._called(inode)}"))

    def _make_folder(self, call: _Call) -> None:
        if at := self._at(call):
            inode = self._new_inode(folder=True)
            self._name_changes(f"mkdir {self._path(*at)}", (*at, inode))

    def _remove(self, call: _Call) -> None:
        if at := self._at(call):
            self._name_changes(f"{call.name} {self._path(*at)}", (*at, None))

    def _rename(self, call: _Call) -> None:
        if "RENAME_EXCHANGE" in call.arguments or "RENAME_WHITEOUT" in call.arguments:
            raise NotImplementedError(f"{call.arguments[-60:]} is not modelled")
        old, new = self._at(call, 0), self._at(call, 1)
        if old is None and new is None:
            return
        if old is None or new is None:
            raise NotImplementedError("a rename out of or into what is recorded is not modelled")
        says = f"rename {self._path(*old)} -> {self._path(*new)}"
        self._name_changes(says, (*old, None), (*new, self._look(old)))

    def _link(self, call: _Call) -> None:
        old, new = self._at(call, 0), self._at(call, 1)
        if new is not None:
            if old is None:
                raise NotImplementedError("a link to a file that is not recorded is not modelled")
            says = f"link {self._path(*old)} -> {self._path(*new)}"
            self._name_changes(says, (*new, self._look(old)))

    def _map(self, call: _Call) -> None:
        parts = call.arguments.split(", ")
        if len(parts) == 6 and "PROT_WRITE" in parts[2] and "MAP_SHARED" in parts[3]:
            match = _DESCRIPTOR.match(parts[4])
            if match and int(match[1]) in self._descriptors:
                raise NotImplementedError("writing through memory (mmap) is not modelled")

    def _clone(self, call: _Call) -> None:
        if "CLONE_FILES" not in call.arguments:
            raise NotImplementedError("another process is not modelled")

    def _send(self, call: _Call) -> None:
        string = _STRING.search(call.arguments)
        assert string is not None, call
        packet = json.loads(_bytes(string[1]))
        step = packet.get("saved")
        self.operations.append(
            Report(step, f"report {packet}" if step is None else f"report that {step} is saved")
        )


_HANDLERS: dict[str, Callable[[Recording, _Call], None]] = {
    "open": Recording._open,
    "openat": Recording._open,
    "creat": Recording._open,
    "dup": Recording._duplicate,
    "dup2": Recording._duplicate,
    "dup3": Recording._duplicate,
    "fcntl": Recording._duplicate,
    "lseek": Recording._seek,
    "read": Recording._read,
    "readv": Recording._read,
    "write": Recording._write,
    "writev": Recording._write,
    "pwrite64": Recording._write,
    "pwritev": Recording._write,
    "ftruncate": Recording._truncate,
    "truncate": Recording._truncate,
    "fallocate": Recording._allocate,
    "fsync": Recording._sync,
    "fdatasync": Recording._sync,
    "sync": Recording._sync,
    "syncfs": Recording._sync,
    "mkdir": Recording._make_folder,
    "mkdirat": Recording._make_folder,
    "unlink": Recording._remove,
    "unlinkat": Recording._remove,
    "rmdir": Recording._remove,
    "rename": Recording._rename,
    "renameat": Recording._rename,
    "renameat2": Recording._rename,
    "link": Recording._link,
    "linkat": Recording._link,
    "mmap": Recording._map,
    "clone": Recording._clone,
    "clone3": Recording._clone,
    "sendto": Recording._send,
}


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _shown(arguments: str) -> str:
    return re.sub(
        r"(?:\\x[0-9a-f]{2})+", lambda found: _bytes(found[0]).decode("utf-8", "replace"), arguments
    )
