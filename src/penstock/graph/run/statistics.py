"""What a run did: kernels by node, seconds, devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.run.lower import Flat


@dataclass(slots=True)
class Statistics:
    """Filled by the runs that it is given to.

    kernels: how often each node ran, by its name; a node of a body is "loop/node". seconds: of its kernels, those of a
    region shared evenly among its members. devices: of each node that ran. nbytes: of the outputs of each that ran by
    itself, the last time. received_bytes: by worker, the most that it had at a time of what others sent it.
    live_bytes: by worker, the most bytes of tensors that a run had there at a time, but variables, constants and what
    is below 4 KiB; "" is the worker of a session in one process.
    is_warm: kernels without a state run three times, and the faster of the last two counts: the first may load what
    they need, and other programs may run beside.
    """

    kernels: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    live_bytes: dict[str, int] = field(default_factory=dict)
    is_warm: bool = False

    def add_live(self, task: str, nbytes: int) -> None:
        """Count what a run had at a time."""
        self.live_bytes[task] = max(self.live_bytes.get(task, 0), nbytes)

    def add(self, flat: Flat, seconds: float, outputs: Sequence[Any] | None = None) -> None:
        """Count a kernel of a node. outputs: what it gave, where that is known."""
        if not flat.counts:
            return
        self.kernels[flat.name] = self.kernels.get(flat.name, 0) + 1
        self.seconds[flat.name] = self.seconds.get(flat.name, 0.0) + seconds
        self.devices[flat.name] = (flat.node.device if flat.node is not None else "") or "cpu"
        if outputs is not None:
            self.nbytes[flat.name] = sum(getattr(each, "nbytes", 0) for each in outputs)
