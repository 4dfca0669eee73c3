"""The examples of the page on JAX and TensorFlow run as they are written."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.patience import patient

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "jax-and-tensorflow.md"
ONE_DEVICE, SEVERAL_DEVICES, SEVERAL_HOSTS, TENSORFLOW = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL
)


@pytest.fixture
def start(image_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a script beside `photos/train`, of 40 pictures."""
    image_folder(40, name="photos/train")

    def start(script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def end(process: subprocess.Popen[str]) -> tuple[list[str], str, int]:
    """Return what it printed, its errors and its exit status."""
    printed, errors = process.communicate(timeout=patient(120))
    return printed.splitlines(), errors, process.returncode


@pytest.mark.slow
def test_jax_on_one_device_and_on_several(start: Callable[..., subprocess.Popen[str]]) -> None:
    printed, errors, status = end(start(ONE_DEVICE + SEVERAL_DEVICES))

    assert status == 0, errors
    assert printed == ["(3072, 2) float32", "P('data',) 1"] or printed[0] == "(3072, 2) float32", printed
    assert "2 epochs of 2 steps" in errors


@pytest.mark.slow
def test_jax_in_two_processes(start: Callable[..., subprocess.Popen[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ended = [end(each) for each in [start(SEVERAL_HOSTS, address, "2", str(k)) for k in range(2)]]

    for process, (printed, errors, status) in enumerate(ended):
        assert status == 0, errors
        assert len(printed) == 2, printed
        rows = f"(slice({8 * process}, {8 * process + 8}, None),)"
        assert all(line.startswith(f"(16, 3, 32, 32) {rows} [") for line in printed), printed
    assert ended[0][0] != ended[1][0]


@pytest.mark.slow
def test_processes_of_jax_that_would_read_differently_are_all_told(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    differing = SEVERAL_HOSTS.replace("epochs=1", "epochs=1, seed=int(process)")
    assert differing != SEVERAL_HOSTS
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for printed, errors, status in [
        end(each) for each in [start(differing, address, "2", str(k)) for k in range(2)]
    ]:
        assert status != 0
        assert printed == []
        assert re.search(r"ConfigError: .*seed.*0.*1", errors), errors


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="it has no build for this Python")
def test_keras(start: Callable[..., subprocess.Popen[str]]) -> None:
    printed, errors, status = end(start(TENSORFLOW))

    assert status == 0, errors
    assert "Epoch 3/3" in "\n".join(printed)
    assert errors.count("epoch 2:") == 1, errors
