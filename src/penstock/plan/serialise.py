"""An access plan as plain values, and back: what a trace's header says of the run that it recorded.

Orders that are functions of a few numbers are written by those numbers. What somebody else made (listed ids, a user's
function or split) is not written; the recorded spans tell it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.access import AccessPlan
from penstock.plan.batches import Batches, Flat
from penstock.plan.explicit import Explicit, sizes_of_steps
from penstock.plan.mixing import LinearWeights, Mixture
from penstock.plan.orders import BundleShuffle, FullShuffle, Order, Sequential
from penstock.plan.scattered import Scattered
from penstock.plan.splits import Balanced, Local, Replicated, Shares, Split, Strided, Uniform
from penstock.plan.torch_order import TorchDistributed, TorchShuffle, TwisterState
from penstock.trace.schema import GroupIds, Kind, Spans
from penstock.trace.trace import JSON

_ORDERS: dict[str, type[Any]] = {
    order.__name__: order for order in (Sequential, FullShuffle, BundleShuffle, TorchDistributed)
}
_SPLITS: dict[str, type[Any]] = {
    split.__name__: split for split in (Balanced, Local, Uniform, Strided, Replicated)
}


def write_plan(plan: AccessPlan) -> dict[str, JSON]:
    """Return what JSON can say of a plan; `read_plan` makes an equal plan of it.

    "order" or "split" is None where only the spans of the run can tell it.
    """
    assert isinstance(plan.split, Split), "a plan makes it one"
    return {
        "samples": int(plan.samples),
        "batch_size": int(plan.batch_size),
        "epochs": None if plan.is_endless else int(plan.epochs),
        "ranks": int(plan.ranks),
        "drop_last": plan.drop_last,
        **({} if plan.last_steps is None else {"last_steps": int(plan.last_steps)}),
        "order": write_order(plan.order),
        "split": _write_split(plan.split),
    }


def is_told(plan: AccessPlan) -> bool:
    """Whether `write_plan` says all of a plan."""
    return _is_told(write_plan(plan))


def _is_told(written: Mapping[str, Any]) -> bool:
    return written["order"] is not None and written["split"] is not None


def told_plan(written: Mapping[str, Any], last_epoch: int) -> AccessPlan | None:
    """Return the plan that was written; None where order or split was not.

    last_epoch: of the run so far; the plan of a run without end has the epochs up to it.
    Raises: ConfigError if the values are not those of `write_plan`.
    """
    with _values_of_plan():
        if not _is_told(written):
            return None
        order, split = _read_order(written["order"]), _read_split(written["split"])
        batch_size, ranks = int(written["batch_size"]), int(written["ranks"])
        epochs = last_epoch + 1 if written["epochs"] is None else int(written["epochs"])
        drop_last, last_steps = bool(written["drop_last"]), written.get("last_steps")
    return AccessPlan(order, batch_size, epochs, ranks, split, drop_last, last_steps)


@contextmanager
def _values_of_plan() -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the plan is not one that this Penstock wrote ({error!r}): read it with the Penstock that wrote it"
        ) from error


def read_plan(
    written: Mapping[str, Any], rank: int, spans: Spans, ids: GroupIds | None = None
) -> tuple[AccessPlan, int]:
    """Return the plan that was written, and the rank's number in it.

    spans: SPAN[n] of the rank. Where order or split was not written, the plan is what these read, as the only rank
        of a job: the ids of each step are exact for steps that were loaded alone, their order within a step is that of
        their decoding, and what the run did not come to is missing. Steps that were loaded together by several calls
        have the same ids together, in the order of their decoding. Of a run without end the plan has the epochs that
        these come to.
    ids: which samples groups of them are, by (rank, flow).

    Raises: ConfigError if the values are not those of `write_plan`, or the spans are needed and read nothing, or do not
        tell which samples a group was.
    """
    plan = told_plan(written, int(spans["epoch"].max(initial=0)))
    if plan is not None:
        return plan, rank
    with _values_of_plan():
        samples = int(written["samples"])
    return _replayed(spans, samples, ids or {}), 0


def write_order(order: Order) -> JSON:
    """Return an order as JSON; None if only its own code, or a list, says what it is."""
    if isinstance(order, TorchShuffle):
        state = order.state
        assert isinstance(state, TwisterState), "an order makes it one"
        return {
            "kind": "TorchShuffle",
            "samples": int(order.samples),
            "words": base64.b64encode(state.words.astype("<u4").tobytes()).decode(),
            "used": int(state.used),
            "is_global": bool(order.is_global),
            "persistent_workers": bool(order.persistent_workers),
            "first_epoch": int(order.first_epoch),
        }
    if type(order) is Mixture:
        written = {name: getattr(order, name) for name in _arguments(Mixture)}
        is_linear = isinstance(order.weights, LinearWeights)
        schedule: Any = order.weights.rows if isinstance(order.weights, LinearWeights) else order.weights
        listed = {"sizes": list(order.sizes), "weights": [[step, list(row)] for step, row in schedule]}
        if is_linear:
            listed["is_linear"] = True
        numbers = {name: int(written[name]) for name in ("seed", "batch_size")}
        return {"kind": "Mixture", **written, **listed, **numbers}
    if type(order) is Scattered:
        inner = write_order(order.order)
        return None if inner is None else {"kind": "Scattered", "order": inner, "seed": int(order.seed)}
    kind = _ORDERS.get(type(order).__name__)
    if kind is not type(order):
        return None
    return {"kind": kind.__name__, **{name: _plain(getattr(order, name)) for name in _arguments(kind)}}


def _read_order(written: Mapping[str, Any]) -> Order:
    arguments = dict(written)
    kind = arguments.pop("kind")
    if kind == "TorchShuffle":
        words = np.frombuffer(base64.b64decode(arguments.pop("words")), "<u4").astype(np.uint32)
        return TorchShuffle(state=TwisterState(words, arguments.pop("used")), **arguments)
    if kind == "Mixture":
        weights = arguments.pop("weights")
        is_linear = arguments.pop("is_linear", False)
        return Mixture(weights=LinearWeights(weights) if is_linear else weights, **arguments)
    if kind == "Scattered":
        return Scattered(_read_order(arguments.pop("order")), **arguments)
    order: Order = _ORDERS[kind](**arguments)
    return order


def _write_split(split: Split) -> JSON:
    if isinstance(split, Shares):
        return [int(weight) for weight in split.weights]
    kind = type(split).__name__
    return kind if _SPLITS.get(kind) is type(split) else None


def _read_split(written: Any) -> Split:
    if isinstance(written, list):
        return Shares(tuple(written))
    split: Split = _SPLITS[written]()
    return split


def _replayed(spans: Spans, samples: int, ids: GroupIds) -> AccessPlan:
    used = spans[(spans["kind"] == Kind.DECODE) & (spans["step"] >= 0)]
    if not used.size:
        raise ConfigError("no sample was decoded in the recorded run, so there is no order to replay")
    order = Explicit.from_trace(used, samples, ids)
    _, batch = np.unique(np.stack([used["epoch"], used["step"]]), axis=1, return_inverse=True)
    loaded = np.bincount(batch.reshape(-1), used["samples"]).astype(np.int64)
    steps = np.ones(loaded.size, np.int64)
    np.maximum.at(steps, batch.reshape(-1), used["bytes"] + 1)
    sizes = sizes_of_steps(loaded, steps)
    epochs = int(np.unique(used["epoch"]).size)
    ends = np.searchsorted(np.cumsum(sizes), np.cumsum([order.length(epoch) for epoch in range(epochs)])) + 1
    by_epoch = np.split(sizes, ends[:-1])
    if all((each[:-1] == sizes.max()).all() for each in by_epoch):
        return AccessPlan(order, int(sizes.max()), epochs)
    batches = [
        Flat(order.at(epoch, np.arange(each.sum())), np.concatenate(([0], np.cumsum(each))))
        for epoch, each in enumerate(by_epoch)
    ]
    return AccessPlan.of_batches(Batches(batches, samples), epochs)


def _arguments(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.init]


def _plain(value: Any) -> JSON:
    """A number of NumPy's is no JSON; a seed or a ratio may be one."""
    if isinstance(value, bool):
        return value
    return int(value) if isinstance(value, (int, np.integer)) else float(value)
