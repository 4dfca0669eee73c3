"""The table of operations: attributes, inference of types and shapes, kernels by type of device.

A kernel is made once per node of a plan. How it is called follows from the operation's kind:

| kind | made by | called with | in a region |
|---|---|---|---|
| pure | make(node) | the inputs | yes |
| state | make(node, resources) | the inputs | no |
| random | make(node, resources) | the draw's key, then the inputs | no |
| waiting | make(node, resources) | a waiter, then the inputs; returns at once | no |
| control | none: the executor itself | | no |

A kernel gives its value, or a tuple of them where the node has not exactly one output. It never changes an input.

What a node computes stands next to its shapes, for placements that nobody measured: see `penstock.graph.ops.work`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec

from penstock.graph.errors import MismatchError, UnknownOperationError, nearest
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.sizes import Flops, one_each

P = ParamSpec("P")
Kind = Literal["pure", "state", "random", "waiting", "control"]
Infer = Callable[[Node, Sequence[Spec]], Sequence[Spec]]
#: In the place of a default: the attribute has to be given.
REQUIRED: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation.

    inputs: how many at least and at most; None: any number. attributes: names with defaults, or REQUIRED.
    kernels: by type of device, "cpu" being what others fall back to. alternatives: further kernels by name, which the
    attribute `kernel` of a node chooses; a run never does, as their results differ in the last bits.
    differentiable: whether its gradient is that of its kernel by torch. handles: whether it takes variables as such,
    and not their values. takes_out: whether its first kernel writes its value into a tensor that it is given as `out`,
    as torch's functions do. flops: what it computes; None: it gives what is there, or a view
    of it as Slice does, or reads its shape alone, which counts as no time.
    """

    name: str
    infer: Infer
    kind: Kind = "pure"
    inputs: tuple[int, int | None] = (0, 0)
    attributes: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Callable[..., Callable[..., Any]]] = field(default_factory=dict)
    alternatives: dict[str, Callable[..., Callable[..., Any]]] = field(default_factory=dict)
    differentiable: bool = False
    handles: bool = False
    takes_out: bool = False
    flops: Flops | None = one_each

    def kernel(self, node: Node) -> Callable[..., Callable[..., Any]]:
        """Return what makes the kernel of a node, by attribute or a device such as "/job:a/task:0/device:cuda:1"."""
        if self.alternatives and node.attr.get("kernel"):
            return self.alternatives[node.attr["kernel"]]
        kind = node.device.rpartition("device:")[2].partition(":")[0] or "cpu"
        return self.kernels.get(kind) or self.kernels["cpu"]


_OPERATIONS: dict[str, Operation] = {}
_FAMILIES: dict[str, Callable[[str], Operation | None]] = {}


def _registering(make: Callable[P, Operation]) -> Callable[P, None]:
    def register(*arguments: P.args, **fields: P.kwargs) -> None:
        operation = make(*arguments, **fields)
        assert operation.name not in _OPERATIONS, f"{operation.name} is there"
        _OPERATIONS[operation.name] = operation

    return register


#: Adds an operation to the table: called as `Operation` is.
register = _registering(Operation)


def register_family(prefix: str, find: Callable[[str], Operation | None]) -> None:
    """Let a function find the operations whose names begin with a prefix."""
    _FAMILIES[prefix] = find


def operations() -> list[str]:
    """Return the names of all operations of the table, sorted."""
    return sorted(_OPERATIONS)


def operation(name: str) -> Operation:
    """Return an operation by name; "aten.NAME.OVERLOAD" is any of PyTorch's.

    Raises: UnknownOperationError with the nearest names.
    """
    found = _OPERATIONS.get(name)
    for prefix, find in _FAMILIES.items():
        if found is None and name.startswith(prefix):
            found = find(name)
    if found is None:
        raise UnknownOperationError(f"there is no operation {name!r:.80}{nearest(name, _OPERATIONS)}")
    return found


def checked_attributes(node: Node) -> dict[str, Any]:
    """Return a node's attributes with the defaults filled in.

    Raises: MismatchError if one is unknown or missing.
    """
    known, alternatives = operation(node.op).attributes, operation(node.op).alternatives
    if alternatives:
        known = {**known, "kernel": ""}
        name = node.attr.get("kernel", "")
        if not isinstance(name, str) or (name and name not in alternatives):
            raise MismatchError(f"{node.op} has no kernel {name!r:.80}{nearest(str(name), alternatives)}")
    for name in node.attr:
        if name not in known:
            raise MismatchError(f"{node.op} has no attribute {name!r:.80}{nearest(name, known)}")
    for name, default in known.items():
        if default is REQUIRED and name not in node.attr:
            raise MismatchError(f"{node.op} needs the attribute {name!r}")
    return {name: node.attr.get(name, default) for name, default in known.items()}
