"""Ranks whose shared store is a network file system in user space: SFTP, mounted by sshfs, over a TCP connection."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.measure.test_calibrate_mounted import fuse_can_be_opened
from tests.patience import patient, wait_until
from tests.ranks.in_memory import run

from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw
from penstock.policy import Scheduler
from penstock.ranks import Ranks, alone

SAMPLES, SAMPLE_BYTES, EPOCHS, RANKS = 60, 5000, 3, 2
_SERVER = "/usr/lib/openssh/sftp-server"

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not fuse_can_be_opened(), reason="/dev/fuse cannot be opened"),
]


class Mounted:
    """A folder, and where it is mounted. `opened`: how often the server was asked to open each file."""

    def __init__(self, folder: Path, at: Path, log: Path) -> None:
        self.folder, self.at, self._log = folder, at, log

    @property
    def opened(self) -> Counter[str]:
        lines = [line for line in self._log.read_text().splitlines() if line.startswith("open ")]
        return Counter(Path(line.split('"')[1]).name for line in lines)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Mounted]:
    """The server talks to the one connection that it is handed: no daemon, no keys, no port that stays open."""
    folder, at, log = tmp_path / "data", tmp_path / "mounted", tmp_path / "log"
    folder.mkdir()
    at.mkdir()
    for sample in range(SAMPLES):
        (folder / f"{sample:03d}.png").write_bytes(bytes([sample]) * SAMPLE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("w") as errors:
        port = listening.getsockname()[1]
        options = f"directport={port},ro,cache=no,dir_cache=no"
        mounting = subprocess.Popen(["sshfs", "-f", f"127.0.0.1:{folder}", str(at), "-o", options])
        listening.settimeout(patient(20))
        connection, _ = listening.accept()
        with connection:
            server = subprocess.Popen(
                [_SERVER, "-e", "-l", "INFO", "-R"],
                stdin=connection.fileno(),
                stdout=connection.fileno(),
                stderr=errors,
            )
        wait_until(at.is_mount)
        yield Mounted(folder, at, log)
        subprocess.run(["fusermount3", "-u", str(at)], check=True)
        mounting.wait(patient(20))
        server.wait(patient(20))


def test_ranks_read_a_network_file_system_once_and_have_the_batches_of_one_that_reads_a_disk(
    store: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "waited", lambda *_: [])  # a busy machine keeps promises late
    together = threading.Barrier(RANKS)

    def batches_of(source: Path, ranks: Ranks, **options: Any) -> list[np.ndarray[Any, Any]]:
        found = []
        with Loader(
            str(source),
            batch_size=16,
            epochs=EPOCHS,
            seed=3,
            memory="4 MB",
            transforms=[DecodeRaw("uint8", (SAMPLE_BYTES,))],
            dtype="uint8",
            report=None,
            refresh="full",
            ranks=lambda: ranks,
            **options,
        ) as loader:
            while loader.position[0] < EPOCHS:
                for batch in loader:
                    found.append(batch[0].copy())
                    if options:
                        together.wait(patient(20))
        return found

    of_ranks = run(
        RANKS,
        lambda ranks: batches_of(store.at, ranks, rank=ranks.rank, world_size=RANKS, share="host"),
    )
    whole = batches_of(store.folder, alone())

    assert not [each for each in of_ranks if isinstance(each, BaseException)], of_ranks
    for number, batch in enumerate(whole):
        assert (np.concatenate([each[number] for each in of_ranks]) == batch).all()
    assert set(store.opened) == {f"{sample:03d}.png" for sample in range(SAMPLES)}
    # Each rank reads one sample more, to see what samples are like.
    assert store.opened.total() <= SAMPLES + RANKS
