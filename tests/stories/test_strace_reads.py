"""How often a training opens its files and lists its folders, counted by the kernel and not by us."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

SAMPLES, EPOCHS, BATCH = 600, 3, 16

JOB = """
import sys
from penstock import Loader, Machine
from penstock.loader.transforms import CenterCrop, ToTensor

folder, tier_bytes, batch_size, epochs = sys.argv[1], *map(int, sys.argv[2:])
tier = f'''
[[storage]]
name = "memory"
capacity = "{tier_bytes} B"
threads = 2
read = "10 GB/s"
'''
machine = Machine.from_toml('''
[source]
read = "1 GB/s"
threads = 8
[[storage]]
name = "staging"
capacity = "10 MB"
threads = 2
read = "10 GB/s"
''' + (tier if tier_bytes else ""))
with Loader(
    folder,
    batch_size=batch_size,
    epochs=epochs,
    transforms=[CenterCrop(32), ToTensor()],
    memory="64 MB",
    machine=machine,
    report=None,
) as loader:
    assert loader.memory.tier_bytes == tier_bytes
    print(sum(len(labels) for _ in range(epochs) for _, labels in loader))
"""

#: Ranks of a job: processes of one that has imported everything, with torchrun's variables.
RANKS = 8
RANKED_JOB = f"""
import os, sys
import torch.distributed
from penstock import Loader
from penstock.loader.transforms import CenterCrop, ToTensor

folder, rendezvous = sys.argv[1:]
children = []
for rank in range({RANKS}):
    if child := os.fork():
        children.append(child)
        continue
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="{RANKS}", GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size={RANKS})
    with Loader(
        folder,
        batch_size={BATCH},
        epochs=1,
        transforms=[CenterCrop(32), ToTensor()],
        memory="16 MB",
        decoders=0,
        rank=rank,
        world_size={RANKS},
        report=None,
    ) as loader:
        os.write(1, str(sum(len(labels) for _, labels in loader)).encode() + b" ")
    torch.distributed.destroy_process_group()
    os._exit(0)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Uncompressed images, so that all are of one size and a tier holds a known number of them."""
    rng = np.random.default_rng(3)
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(SAMPLES // 2):
            image = rng.integers(0, 255, (32, 32, 3), np.uint8)
            assert cv2.imwrite(str(tmp_path / "data" / label / f"{number:04}.bmp"), image)
    return tmp_path / "data"


def opens_of(folder: Path, log: Path) -> Counter[str]:
    """Count the successful opens of each file below a folder in strace's output."""
    opened = re.compile(r'openat\(.*?"(' + re.escape(str(folder)) + r'/[^"]*\.bmp)".*(?:= \d+|unfinished)')
    return Counter(found[1] for line in log.read_text().splitlines() if (found := opened.search(line)))


@pytest.mark.system
@pytest.mark.parametrize("held", [0, SAMPLES // 2, SAMPLES])
def test_a_file_is_opened_no_more_often_than_the_bound_for_its_memory_says(
    photographs: Path, tmp_path: Path, held: int
) -> None:
    """A tier of C of F files leaves F + (E-1)(F-C) reads in E epochs on one rank: any file is used once an
    epoch.

    A few less are possible, where a file that is read at the end of an epoch is used again at the start of
    the next before its bytes are gone.
    """
    file_bytes = (photographs / "cat" / "0000.bmp").stat().st_size
    log = tmp_path / "strace.log"

    tier_bytes = held * file_bytes

    strace = ["strace", "-f", "--seccomp-bpf", "-e", "trace=openat", "-o", str(log)]
    job = subprocess.run(
        [*strace, sys.executable, "-c", JOB, str(photographs), str(tier_bytes), str(BATCH), str(EPOCHS)],
        capture_output=True,
        text=True,
    )

    assert (job.returncode, job.stdout.strip()) == (0, str(SAMPLES * EPOCHS)), job.stderr
    opens = opens_of(photographs, log)
    bound = SAMPLES + (EPOCHS - 1) * (SAMPLES - held)
    assert len(opens) == SAMPLES
    # A loader reads one sample before it starts, to know what decoding takes.
    assert sum(max(0, count - EPOCHS) for count in opens.values()) <= 1
    assert sum(opens.values()) <= 1.01 * bound


@pytest.mark.system
def test_one_rank_of_a_job_lists_the_folders_and_asks_for_the_sizes(
    photographs: Path, tmp_path: Path
) -> None:
    """The other seven are sent what it found: the folder of each label is read once, each file asked for once."""
    log = tmp_path / "strace.log"

    calls = "trace=getdents64,stat,lstat,newfstatat,statx"
    strace = ["strace", "-f", "-y", "--seccomp-bpf", "-e", calls, "-o", str(log)]
    job = subprocess.run(
        [*strace, sys.executable, "-c", RANKED_JOB, str(photographs), str(tmp_path / "rendezvous")],
        capture_output=True,
        text=True,
    )

    assert (job.returncode, sum(map(int, job.stdout.split()))) == (0, SAMPLES), job.stderr
    text = log.read_text()
    listings = Counter(re.findall(rf"getdents64\(\d+<({re.escape(str(photographs))}[^>]*)>", text))
    # Two calls read a folder: the second finds no more. The first folder is also read to see what kind it is of.
    assert listings.pop(str(photographs)) <= 4
    assert listings == {str(photographs / label): 2 for label in ("cat", "dog")}
    asked = Counter(re.findall(rf'stat(?:at|x)?\([^"]*"({re.escape(str(photographs))}/[^"]*\.bmp)"', text))
    assert asked == {str(file): 1 for file in photographs.glob("*/*.bmp")}
