"""Memory stays within what the user gave, whatever the data set's size."""

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

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
run(sys.argv[2], "{given} MiB", 2)
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


#: A day at ten steps a second, in epochs of a thousand. What is in use is counted, not pages: the allocator has a heap
#: for each thread, and a thread that sums up spans for the first time after hours may touch more of its own. Threads
#: and slots are fixed, as those found best take memory whenever they are found. The sums of 512 epochs are kept; then,
#: every 128 epochs, some are joined: so the most of 144 epochs is compared with the most of the next 144.
DAY = """
import ctypes, gc, sys
import numpy as np
from penstock import Loader
from penstock.store import Records

STEPS, EPOCHS, WINDOW = 1000, 864, 144
np.zeros((16 * STEPS, 64), np.uint8).tofile(sys.argv[1])

class Allocated(ctypes.Structure):  # glibc's struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Allocated

def bytes_in_use(loader):
    loader.metrics  # sums up what is recorded
    gc.collect()
    now = mallinfo2()
    return now.uordblks + now.hblkhd

lines, most = [], [0] * (EPOCHS // WINDOW)
with Loader(Records(sys.argv[1], "u1", 64), batch_size=16, epochs=EPOCHS, policy=sys.argv[2], readers=2, decoders=2,
            prefetch=8, report=lines.append) as loader:
    for epoch in range(EPOCHS):
        for batch in loader:
            pass
        lines.clear()
        if epoch % 8 == 7:
            most[epoch // WINDOW] = max(most[epoch // WINDOW], bytes_in_use(loader))
print(most[-1] - most[-2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["frequency", "staging"])
def test_a_days_steps_do_not_let_memory_grow(tmp_path: Path, policy: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", DAY, tmp_path / "rows", policy],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONMALLOC": "malloc"},  # Python's objects are counted, too
    )

    assert int(result.stdout) < 2 << 20  # 15 bytes for each of its steps are more
