"""Is a graph what a PyTorch module is? Part by part, within a tolerance; and a step at learning rate 0.

Source: Abadi et al. 2015, section 6, lessons 3 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import MismatchError, NotFoundError, nearest
from penstock.graph.model.dtypes import shape_text, to_client
from penstock.graph.model.graph import Edge
from penstock.graph.run.session import Session


@dataclass(frozen=True, slots=True)
class PartDifference:
    """How a part of a graph differs from the submodule of a name.

    largest: of the absolute differences, infinite where NaNs are not in the same places; tolerated: what was allowed
    for that element. worst: its index.
    """

    name: str
    largest: float
    tolerated: float
    worst: tuple[int, ...]

    @property
    def is_within(self) -> bool:
        """Return whether every element is within the tolerance."""
        return self.largest <= self.tolerated


def compare_parts(
    session: Session,
    parts: Mapping[str, tuple[Sequence[Edge | str], Edge | str]],
    module: torch.nn.Module,
    inputs: Sequence[Any],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> list[PartDifference]:
    """Run a module, and each part of a graph on what the submodule of its name was given, so that errors do not add up.

        compare_parts(session, {"conv1": ([x], h1), "conv2": ([h1], h2), "": ([x], y)}, module, [images])

    parts: by name of a submodule, "" for the whole module: the edges that are fed what the submodule took, and the one
        that gives what the submodule gives. A part without edges to feed computes from the session's state.
    inputs: arrays or tensors that the module takes. rtol, atol: allowed is atol + rtol * |of the module|.
    Returns: the differences, in the order of `parts`.
    Raises: NotFoundError if there is no such submodule, or the module did not run it; MismatchError if shapes differ.
    """
    known = dict(module.named_modules())
    seen: dict[str, tuple[tuple[Any, ...], Any]] = {}
    hooks = []
    for name in parts:
        if name not in known:
            raise NotFoundError(f"the module has no part {name!r}{nearest(name, known)}")
        # The first call: a module that is used twice has one name.
        hooks.append(
            known[name].register_forward_hook(
                lambda _, given, gave, name=name: seen.setdefault(name, (given, gave)) and None
            )
        )
    try:
        with torch.no_grad():
            module(*map(torch.as_tensor, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return [_difference(session, name, *part, seen, rtol, atol) for name, part in parts.items()]


def _difference(
    session: Session,
    name: str,
    taken: Sequence[Edge | str],
    given: Edge | str,
    seen: Mapping[str, tuple[tuple[Any, ...], Any]],
    rtol: float,
    atol: float,
) -> PartDifference:
    if name not in seen:
        raise NotFoundError(f"the module did not run its part {name!r} with these inputs")
    inputs, expected = seen[name]
    if taken and len(taken) != len(inputs):
        raise MismatchError(
            f"the module's part {name!r} takes {len(inputs)} tensors, and {len(taken)} edges are fed"
        )
    found = session.run(given, dict(zip(taken, inputs, strict=True)) if taken else {})
    reference = to_client(expected)
    if found.shape != reference.shape:
        raise MismatchError(
            f"part {name!r} has shape {shape_text(found.shape)} in the graph, and in the module "
            f"{shape_text(reference.shape)}"
        )
    if not found.size:
        return PartDifference(name, 0.0, atol, ())
    # Exact, as float64 is for float32; equal infinities and NaNs in the same places do not differ.
    one, other = np.asarray(found, np.float64), np.asarray(reference, np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    apart = np.where(np.isnan(apart), np.inf, apart)
    allowed = atol + rtol * np.where(np.isfinite(other), np.abs(other), 0.0)
    worst = np.unravel_index(int(np.argmax(apart - allowed)), apart.shape)
    return PartDifference(name, float(apart[worst]), float(allowed[worst]), tuple(map(int, worst)))


def changed_variables(
    session: Session, targets: Sequence[Any], feeds: Mapping[Any, Any] | None = None
) -> list[str]:
    """Run a step, and return the variables whose bits it changed: none, for a step of training at learning rate 0.

    What a variable holds as -0.0, a step that adds zeros makes 0.0; the two count as equal.
    """
    nodes = [node for node in session.graph.nodes.values() if node.op == "Variable"]
    fetches = [f"{node.name}:0" for node in nodes]
    before = session.run(fetches)
    session.run((), feeds, targets)
    return [
        node.name
        for node, one, other in zip(nodes, before, session.run(fetches), strict=True)
        if one.tobytes() != other.tobytes() and not np.array_equal(one, other)
    ]
