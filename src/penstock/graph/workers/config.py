"""How a session on workers is opened, as a value: printed, compared, and given to several sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypedDict

from penstock.errors import given_beside
from penstock.graph.run.session import checked_seed
from penstock.machine import Machine
from penstock.validate import check_above_zero, check_rate, check_seconds


class SessionArguments(TypedDict, total=False):
    """The arguments of a session on workers, see `SessionConfig`."""

    seed: int
    costs: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None
    link_latency_seconds: float | None
    link_bytes_per_second: float | None
    machine: Machine | str | os.PathLike[str] | None
    objective: str
    lost_seconds: float
    lag_seconds: float | None
    node_seconds: float | None
    shares_memory: bool
    is_lossy: bool
    orders_receives: bool
    regions: bool
    check_finite: bool


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How a `WorkerSession` places nodes and sends tensors: all that it is given but the graph and the workers.

    seed: of all draws. costs: by node, {"cost": seconds by device, "bytes": of its output}, as `learn` returns; or a
        file: a trace of runs of the graph, or JSON of what `learn` returned; see `read_costs`. Without them, a node
        costs what is estimated for the devices of a machine, and nothing without a machine. link_...: between any two
        workers, for the placement; None: 50 us and 1 GB/s, until `learn` measures what each two take. machine: or its
        file, with devices of these workers, the preferred ones first, their memory and rates, links between them and
        the network, in place of link_bytes_per_second; `learn` measures no links then. objective: as of `place_graph`.
    lost_seconds: a worker whose messages' own thread is silent for so long is lost; one that ends is at once.
    lag_seconds: one whose Python answers no health check for so long is given up: a node that computes does not keep
        it from that, one call into C that keeps Python's lock for so long does. None: never. node_seconds: one that
        runs a node for so long is given up, though it answers; None: a node takes as long as it takes.
    shares_memory: whether workers of one host send each other tensors by memory that both map. is_lossy: workers
        send each other float32 as its upper 16 bits, and zeros take the place of the others; feeds and fetches are
        exact. orders_receives: workers ask for what they need late, by `costs`, instead of keeping it. regions,
        check_finite: as of `Session`.

    Raises: MismatchError for a seed that is none; ConfigError for times and rates that are none.
    """

    _: KW_ONLY
    seed: int = 0
    costs: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None
    link_latency_seconds: float | None = None
    link_bytes_per_second: float | None = None
    machine: Machine | str | os.PathLike[str] | None = None
    objective: str = "search"
    lost_seconds: float = 3.0
    lag_seconds: float | None = 3.5
    node_seconds: float | None = None
    shares_memory: bool = True
    is_lossy: bool = False
    orders_receives: bool = True
    regions: bool = True
    check_finite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_seed(self.seed))
        check_above_zero("lost_seconds", self.lost_seconds)
        for name, seconds in (("lag_seconds", self.lag_seconds), ("node_seconds", self.node_seconds)):
            if seconds is not None:
                check_above_zero(name, seconds)
        if self.link_latency_seconds is not None:
            check_seconds("link_latency_seconds", self.link_latency_seconds)
        if self.link_bytes_per_second is not None:
            check_rate("link_bytes_per_second", self.link_bytes_per_second)


def session_config(config: SessionConfig | None, arguments: SessionArguments) -> SessionConfig:
    """Return the configuration that a session was given, as one value or argument by argument.

    Raises: ConfigError for both.
    """
    if config is not None and arguments:
        raise given_beside(config, arguments)
    return config or SessionConfig(**arguments)
