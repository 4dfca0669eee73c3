"""Any operation of PyTorch's ATen library by its name, such as "aten.relu.default".

Its attributes are `args` and `kwargs`, in which {"input": i} stands for input i, {"dtype": "float32"} for a dtype and
{"float": "-inf"} for a number that JSON has not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.graph.errors import MismatchError, UnsupportedError
from penstock.graph.model.dtypes import common, dtype_of_torch, is_known, torch_dtype
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.registry import Operation, register_family
from penstock.graph.ops.sizes import one_each

#: What unknown sizes are tried as: the sizes of outputs that differ between two trials are unknown.
_TRIALS = (2, 3)
#: Of each element that is compared, as no processor's vectors do it: measured, 2 ms for 524,288 in windows of 2 x 2.
_MAX_POOL_FLOPS = 300.0
_WORDS: dict[str, Any] = {
    "dtype": torch_dtype,
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
    "device": torch.device,
    "float": float,
}


def encode(value: Any) -> Any:
    """Return an argument as JSON has it. Raises: MismatchError if it cannot."""
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_of_torch(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout | torch.memory_format):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise MismatchError(f"an argument is {value!r:.80}, which no graph text can hold")


def _filled(template: Any, values: Sequence[Any]) -> Any:
    if isinstance(template, dict) and len(template) == 1:
        ((kind, value),) = template.items()
        if kind == "input":
            return values[value]
        return _WORDS[kind](value)
    if isinstance(template, list | tuple):
        return [_filled(each, values) for each in template]
    return template


def _infer(node: Node, specs: Sequence[Spec], call: Callable[..., Any]) -> Sequence[Spec]:
    _refuse_draws(node, call)
    found: list[list[Spec]] = []
    for trial in _TRIALS:
        values = []
        for spec in specs:
            if spec.kind not in ("tensor", "variable") or spec.dtype == "bytes" or spec.shape is None:
                raise MismatchError(
                    f"{node.op} takes tensors of numbers of known rank, and an input is {spec}"
                )
            values.append(_meta(spec, trial))
        results = _call_with(node, values, call)
        outputs = results if isinstance(results, tuple | list) else [results]
        found.append([Spec(dtype_of_torch(each.dtype), tuple(each.shape)) for each in outputs])
        if all(is_known(spec.shape) for spec in specs):
            return found[0]
    return [Spec(one.dtype, common(one.shape, two.shape)) for one, two in zip(*found, strict=True)]


def _call_with(node: Node, values: Sequence[torch.Tensor], call: Callable[..., Any]) -> Any:
    try:
        args, kwargs = _arguments(node, values)
        return call(*args, **kwargs)
    except Exception as error:
        raise MismatchError(f"{node.op} refuses these inputs: {error!s:.300}") from error


@dataclass(frozen=True, slots=True)
class _Counted:
    """A call whose work is counted, identified by its operation, arguments and inputs."""

    op: str
    arguments: str
    takes: tuple[Spec, ...]
    node: Node = field(compare=False)


@functools.lru_cache(4096)  # 0.3 ms each, and each placement asks several times
def _flops_by_torch(counted: _Counted) -> float:
    with FlopCounterMode(display=False) as counter:
        _call_with(counted.node, [_meta(spec) for spec in counted.takes], _overload(counted.op))
    return float(counter.get_total_flops())


def _flops(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    """Return what torch's own counter makes of a call; what that has no rule for counts by its elements."""
    each = _MAX_POOL_FLOPS if node.op.startswith("aten.max_pool") else 1.0
    found = _flops_by_torch(_Counted(node.op, repr(node.attr), tuple(takes), node))
    return max(found, each * one_each(node, takes, gives))


def _meta(spec: Spec, unknown: int = 0) -> torch.Tensor:
    """Return a tensor of a spec without numbers. unknown: in place of sizes that are."""
    assert spec.shape is not None, "inputs are of known rank"
    sizes = [unknown if size is None else size for size in spec.shape]
    return torch.empty(sizes, dtype=torch_dtype(spec.dtype), device="meta")


def refuse_draws(op: str, attr: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if an operation is one of ATen's that draws with these attributes."""
    if op.startswith("aten.") and (call := _overload(op)) is not None:
        _refuse_draws(Node("", op, attr=dict(attr)), call)


def _refuse_draws(node: Node, call: Any) -> None:
    if draws(call, node.attr.get("args") or (), node.attr.get("kwargs") or {}):
        raise UnsupportedError(f"{node.op} draws, which depends on what drew before: use RandomUniform")


def draws(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers: not with a dropout of 0, or out of training."""
    if torch.Tag.nondeterministic_seeded not in call.tags:
        return False
    names = [each.name for each in call._schema.arguments]
    defaults = {each.name: each.default_value for each in call._schema.arguments}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    shares = [given[name] for name in ("dropout", "dropout_p") if name in given]
    return given.get("train") is not False and (not shares or shares[0] != 0)


def _arguments(node: Node, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    args = node.attr.get("args")
    if args is None:
        return list(values), {}
    kwargs = node.attr.get("kwargs") or {}
    return _filled(args, values), {name: _filled(each, values) for name, each in kwargs.items()}


def _kernel(node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*values: Any) -> Any:
        args, kwargs = _arguments(node, values)
        results = call(*args, **kwargs)
        return results[0] if isinstance(results, tuple | list) and len(results) == 1 else results

    return kernel


def _overload(name: str) -> Any:
    parts = name.split(".")
    packet = getattr(torch.ops.aten, parts[1], None) if len(parts) in (2, 3) and parts[1] else None
    call = getattr(packet, parts[2] if len(parts) == 3 else "default", None) if packet else None
    return None if not isinstance(call, torch._ops.OpOverload) or call._schema.is_mutable else call


@functools.cache
def aten_operation(name: str) -> Operation | None:
    """Return PyTorch's operation of a name, or None if it has none or one that changes its inputs."""
    call = _overload(name)
    if call is None:
        return None
    return Operation(
        name,
        lambda node, specs: _infer(node, specs, call),
        inputs=(0, None),
        attributes={"args": None, "kwargs": None},
        kernels={"cpu": lambda node: _kernel(node, call)},
        differentiable=True,
        flops=None if call.is_view else _flops,
    )


register_family("aten.", aten_operation)
