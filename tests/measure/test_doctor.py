"""What a machine allows is judged by the kernel's own numbers, and each concern says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.cli.main import main
from penstock.measure.doctor import (
    Finding,
    judge_open_files,
    judge_place,
    judge_processors,
    judge_shared_memory,
)
from penstock.store.mounts import Mount, mount_of, read_mounts

#: As a host writes it: an overlay below, a disk, an NFS server mounted twice over each other, a name with a space.
MOUNTS = r"""
22 1 0:20 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a
30 22 8:1 / /data rw,noatime - ext4 /dev/sda1 rw,errors=remount-ro
31 22 0:40 / /data/a\040set ro,relatime master:3 - nfs4 server:/old ro,hard
32 22 0:41 / /data/a\040set rw,relatime - nfs4 server:/new rw,hard
this is no line of it
"""


def test_a_path_lies_on_the_last_of_the_longest_mounts() -> None:
    mounts = read_mounts(MOUNTS.splitlines())

    assert mount_of("/data/a set/x", mounts) == Mount(
        "/data/a set", "nfs4", "server:/new", "rw,relatime,hard"
    )
    assert mount_of("/data/a settled", mounts) == Mount(
        "/data", "ext4", "/dev/sda1", "rw,noatime,errors=remount-ro"
    )
    assert mount_of("/database", mounts) == mounts[0]
    assert mount_of("/x", []) is None


GB = 10**9


@for_each(
    ("found", "concern"),
    [
        (judge_processors(8, "all", 8), ""),
        (judge_processors(1, "quota", 8), "ask for more"),
        (judge_processors(4, "affinity", 8), "raise the affinity"),
        (judge_open_files(1024, 4096), ""),
        (judge_open_files(256, 4096), "ulimit -n 4096"),
        (judge_open_files(-1, -1), ""),
        (judge_shared_memory(64 << 20), "--shm-size"),
        (judge_shared_memory(8 * GB), ""),
        (judge_place("/data", Mount("/data", "ext4", "/dev/sda1", "rw,noatime"), 9 * GB), ""),
        (judge_place("/data", Mount("/data", "fuse.sshfs", "host:", "rw"), 9 * GB), "network file system"),
        (judge_place("/data", Mount("/data", "ext4", "/dev/sda1", "ro"), 0), "read-only"),
        (judge_place("/data", Mount("/data", "ext4", "/dev/sda1", "rw,sync"), GB), "every write waits"),
        (judge_place("/data", Mount("/data", "ext4", "/dev/sda1", "rw"), 1), "saves will fail"),
        (judge_place("/data", None, None), "a folder that exists"),
    ],
)
def test_what_would_limit_a_training_is_said_with_what_to_do(found: Finding, concern: str) -> None:
    assert concern in found.concern
    assert bool(concern) == bool(found.concern)


def test_the_command_prints_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone\n\x1b[2J"

    assert main(["doctor", f"{tmp_path},{gone}", "--json"]) == 0

    results = {each["what"]: each for each in json.loads(capsys.readouterr().out)["results"]}
    assert results[f"file system of {tmp_path}"]["value"].endswith(" free")
    assert results[f"file system of {gone}"]["concern"] == "name a folder that exists"
    assert {
        "processors",
        "memory",
        "open files",
        "image decoders",
        "compile cache",
        "versions",
    } <= results.keys()
    assert main(["doctor", str(gone)]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
