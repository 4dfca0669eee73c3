"""What a run did: kernels by node, seconds, devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.graph.run.lower import Flat


@dataclass(slots=True)
class Statistics:
    """Filled by the runs that it is given to.

    kernels: how often each node ran, by its name; a node of a body is "loop/node". seconds: of its kernels, those of a
    region shared evenly among its members. devices: of each node that ran.
    """

    kernels: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)

    def add(self, flat: Flat, seconds: float) -> None:
        """Count a kernel of a node."""
        if not flat.counts:
            return
        self.kernels[flat.name] = self.kernels.get(flat.name, 0) + 1
        self.seconds[flat.name] = self.seconds.get(flat.name, 0.0) + seconds
        self.devices[flat.name] = (flat.node.device if flat.node is not None else "") or "cpu"
