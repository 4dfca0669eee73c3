"""Which file system a path lies on, of those that are mounted, and whether its bytes are on other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

_NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "glusterfs", "beegfs", "9p", "afs"),
    *("ocfs2", "gfs2", "orangefs", "wekafs", "virtiofs", "fuse"),
}


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system that is mounted. options: as the kernel lists them, with commas."""

    point: str
    kind: str
    device: str
    options: str


def is_network(file_system: str) -> bool:
    """Return whether a type of file system is one whose bytes are on other hosts, or may be, as those of FUSE."""
    return file_system in _NETWORK_FILE_SYSTEMS or file_system.startswith("fuse.")


def mounted() -> list[Mount]:
    """Return what this process sees mounted, in the order of mounting."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return read_mounts(file)


def read_mounts(lines: Iterable[str]) -> list[Mount]:
    """Return the mounts that /proc/self/mountinfo lists. Source: Linux, Documentation/filesystems/proc.rst, 3.5."""
    found = []
    for line in lines:
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        rest = fields[fields.index("-", 6) + 1 :]
        options = ",".join(dict.fromkeys([*fields[5].split(","), *rest[2].split(",")]))
        found.append(Mount(_unescaped(fields[4]), rest[0], _unescaped(rest[1]), options))
    return found


def mount_of(path: str | os.PathLike[str], mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that a path lies on: the longest, and of equals the last, which covers the others."""
    real = os.path.realpath(path)
    holding = [each for each in mounts if real == each.point or real.startswith(each.point.rstrip("/") + "/")]
    return max(enumerate(holding), key=lambda each: (len(each[1].point), each[0]))[1] if holding else None


def is_on_network(path: str | os.PathLike[str]) -> bool:
    """Return whether a path lies on a file system whose bytes are on other hosts, or may be."""
    mount = mount_of(path, mounted())
    return mount is not None and is_network(mount.kind)


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text
