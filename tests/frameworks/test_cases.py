"""The tests of JAX and TensorFlow, each in a process of its own.

They start threads that no fork of another test survives, and give NumPy types that other tests are to be without.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import patient

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["jax", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_cases(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} has no build for this Python")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(HERE / f"{name}_cases.py")],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
