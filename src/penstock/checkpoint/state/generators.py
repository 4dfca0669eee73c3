"""The random generators that a training shares: Python's, NumPy's and PyTorch's own, as one part of its state."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import ConfigError


def random_state() -> dict[str, Any]:
    """Return the state of the global generators, to be saved with the rest.

    Returns: "python", "numpy", and where PyTorch is in use "torch" and, where CUDA is, "cuda": one per device.
    Generators of one's own are saved by their own states: `torch.Generator.get_state()`,
    `numpy.random.Generator.bit_generator.state`.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 # it is what the program may draw from
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        # Asking would start CUDA on every device.
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to what `random_state` returned; those that it does not name stay.

    Raises: ConfigError if it is no such state, or one of more CUDA devices than there are; nothing is set then.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ConfigError(
            f"state is of type {type(state).__qualname__}; it must be what `random_state` returned: give for example "
            'restored["random"]'
        )
    if "torch" in state or "cuda" in state:
        import torch

        of_devices = state.get("cuda", ())
        if not isinstance(of_devices, Sequence):
            raise ConfigError(
                f'this is no state of random generators: "cuda" is of type {type(of_devices).__qualname__}'
            )
        devices, there = len(of_devices), torch.cuda.device_count()
        if devices > there:
            raise ConfigError(
                f'the random state is of {devices} CUDA devices and here are {there}: take "cuda" out of it to set the '
                "other generators"
            )
    before = random_state()
    try:
        _set(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        _set(before)
        raise ConfigError(f"this is no state of random generators: {error}") from error


def _set(state: dict[str, Any]) -> None:
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])  # noqa: NPY002
    if "torch" in state:
        import torch

        torch.set_rng_state(state["torch"])
    if "cuda" in state:
        import torch

        torch.cuda.set_rng_state_all(state["cuda"])
