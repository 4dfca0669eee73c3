"""Memory stays within what the user gave, whatever the data set's size."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np

PICTURES = 600
GIVEN_MIB = 16
# Stacks of threads, the interpreter's own growth and allocator slack; a third of the data set, so that a loader
# which keeps what it read would be found out.
SLACK_MIB = 14

SCRIPT = """
import resource, sys
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.loader.transforms.compiled import KERNELS

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(folder, memory, epochs):
    with Loader(folder, batch_size=16, epochs=epochs, transforms=[Resize((64, 64)), ToTensor()], memory=memory,
                report=None) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass

run(sys.argv[1], "4 MiB", 1)
KERNELS["float32"].wait()  # machine code is the interpreter's own growth
before = peak_mib()
run(sys.argv[2], "{given} MiB", 4)
print(peak_mib() - before)
"""


def write_pictures(folder: Path, count: int) -> int:
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    for number in range(count):
        cv2.imwrite(
            str(folder / f"{number:03d}.jpg"), np.roll(noise, number, axis=0), [cv2.IMWRITE_JPEG_QUALITY, 95]
        )
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_data_set_of_several_times_the_memory_is_read_within_it(tmp_path: Path) -> None:
    write_pictures(tmp_path / "few", 20)
    total_bytes = write_pictures(tmp_path / "many", PICTURES)
    assert total_bytes > 2 * GIVEN_MIB * 2**20

    script = SCRIPT.replace("{given}", str(GIVEN_MIB))
    result = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "few", tmp_path / "many"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert float(result.stdout) < GIVEN_MIB + SLACK_MIB
