"""Ranks whose shared store is a network file system in user space: SFTP, mounted by sshfs, over a TCP connection."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults import PIPES
from tests.interpreters import Interpreters
from tests.loader.sharing_data import SAMPLE_BYTES, loader
from tests.measure.test_calibrate_mounted import fuse_can_be_opened
from tests.patience import patient, wait_until

from penstock.ranks import alone

SAMPLES, RANKS = 100, 3
_SERVER = "/usr/lib/openssh/sftp-server"

#: One of the processes. It tells the samples of each of its batches, all of whose bytes are right.
RANK = """
    import json, sys
    from pathlib import Path
    from unittest.mock import patch
    from penstock.policy import Scheduler
    from tests.loader.sharing_data import loader, ranks_in
    ranks = ranks_in(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]))
    share = sys.argv[5]
    host = f"host {ranks.rank if share == 'hosts' else 0}"
    batches = []
    with (
        patch.object(Scheduler, "waited", lambda *_: []),  # a busy machine keeps promises late
        patch("penstock.policy.peer_patience.LEAST_SECONDS", 30.0),
        patch("penstock.ranks.descriptors.host_id", lambda: host),
        loader(sys.argv[2], ranks, share=share, refresh="full") as load,
    ):
        for _ in range(load.plan.epochs):
            for rows, _ in load:
                assert (rows == rows[:, :1]).all()
                batches.append(rows[:, 0].tolist())
                ranks.all_gather("a step", None)
        ranks.all_gather("the end", None)
    print(json.dumps(batches))
"""

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


@pytest.mark.parametrize("share", ["host", "hosts"])
def test_processes_read_a_network_file_system_once_and_have_the_batches_of_one_that_reads_a_disk(
    store: Mounted, share: str, tmp_path: Path, interpreters: Interpreters
) -> None:
    messages = tmp_path / "messages"
    messages.mkdir()

    ranks = [
        interpreters.start(RANK, str(messages), str(store.at), str(rank), str(RANKS), share, **PIPES)
        for rank in range(RANKS)
    ]
    try:
        told = [rank.communicate(timeout=patient(60))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()

    assert [rank.returncode for rank in ranks] == [0] * RANKS
    of_ranks = [json.loads(each) for each in told]
    with loader(str(store.folder), alone(), rank=None, world_size=None, share=None) as one:
        whole = [rows[:, 0].tolist() for _ in range(one.plan.epochs) for rows, _ in one]
    assert [list(itertools.chain(*each)) for each in zip(*of_ranks, strict=True)] == whole
    assert set(store.opened) == {f"{sample:03d}.png" for sample in range(SAMPLES)}
    assert store.opened.total() == SAMPLES
