"""Where a run is, as a few readable numbers: what a loader saves, and what it goes on from.

A state is the next global step to consume, and what fixes the samples of every step and their bits: order, batch size,
data, transforms, decoder. It says nothing of ranks, threads, memory or policy, which change neither. JSON of less than
2 KB, equal on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike

from penstock.errors import ConfigError
from penstock.loader.dataset import MapDataset
from penstock.loader.transforms import Pipeline
from penstock.loader.transforms.decoders import choose_decoder, decoder_versions
from penstock.loader.transforms.stages import name_of
from penstock.plan import AccessPlan
from penstock.plan.explicit import Explicit
from penstock.plan.orders import Order
from penstock.plan.serialise import write_order
from penstock.store import Source
from penstock.trace.trace import JSON
from penstock.units import is_integer

#: Of the state's own form.
FORMAT = 1
#: Raise it when the same plan, file and transforms give other pixels than before.
_PIXELS = 1
#: An order that takes more characters is written as a digest.
_MOST_CHARACTERS = 400
#: Positions of an order that are digested at a time; and epochs of one that only its own code knows.
_AT_ONCE, _EPOCHS = 1 << 20, 2
#: By a decoder's name, that of its package where it is another.
_PACKAGES = {"opencv": "opencv-python-headless"}


def describe_run(plan: AccessPlan, source: Source | MapDataset, pipeline: Pipeline | None) -> dict[str, JSON]:
    """Return what fixes which samples each global step has, and their bits.

    pipeline: None for a data set, whose own code makes the samples: of it, only kind and length are known.
    """
    described: dict[str, JSON] = {
        "penstock": version("penstock"),
        "plan": {
            "samples": int(plan.samples),
            "batch_size": int(plan.batch_size),
            "drop_last": bool(plan.drop_last),
            "order": _describe_order(plan.order, plan.epochs),
        },
        "data": {"kind": type(source).__name__},
    }
    if pipeline is not None and isinstance(source, Source):
        described["data"] = {"kind": type(source).__name__, "digest": _digest_source(source)}
        steps = [repr(step) if pipeline.is_built_in(step) else name_of(step) for step in pipeline.transforms]
        described["transforms"] = {
            "steps": _shortened(steps),
            "seed": int(pipeline.seed),
            "dtype": pipeline.dtype,
            "layout": pipeline.layout,
        }
        if pipeline.is_visual:
            decoder = choose_decoder()
            found = decoder_versions().get(_PACKAGES.get(decoder, decoder), "")
            described["pixels"] = {"decoder": f"{decoder} {found}".strip(), "form": _PIXELS}
    return described


def write_state(described: Mapping[str, JSON], epoch: int, step: int) -> dict[str, Any]:
    """Return the state of a run whose next global step is this one. described: by `describe_run`."""
    place: dict[str, Any] = {"format": FORMAT, "epoch": epoch, "step": step}
    # Copied: who changes a state changes no later one.
    return place | {name: deepcopy(value) for name, value in described.items()}


def read_state(
    state: object,
    described: Mapping[str, JSON],
    plan: AccessPlan,
    rank: int,
    allow: Collection[str] = (),
) -> tuple[int, int]:
    """Return the (epoch, step) at which a rank goes on from a state; (epochs, 0) is the end of the run.

    described: this run, by `describe_run`. allow: names of values that may differ, such as "pixels" or "plan.order".
    Raises: ConfigError if it is no state, is of a later Penstock or another run, or the plan has no such step.
    """
    if isinstance(allow, str):
        raise ConfigError(f"allow is {allow!r}: give a list of names, [{allow!r}]")
    if not isinstance(state, Mapping) or "format" not in state:
        raise ConfigError(f"state is {state!r:.80}; it is what a loader's state_dict() returned")
    if state["format"] != FORMAT:
        raise ConfigError(
            f"state has the format {state['format']!r:.20}, of Penstock {state.get('penstock')!r:.20}, and this one "
            f"reads {FORMAT}: go on with the Penstock that wrote it"
        )
    epoch, step = (state.get(name) for name in ("epoch", "step"))
    if not (is_integer(epoch) and is_integer(step) and epoch >= 0 and step >= 0):
        raise ConfigError(
            f"state has epoch {epoch!r:.20} and step {step!r:.20}, which are integers from 0: it is damaged, take "
            "another one"
        )
    saved, here = dict(_flat(state)), dict(_flat(described))
    allowed = ("penstock", *allow)
    differing = [
        name
        for name in here
        if saved.get(name) != here[name] and not any(f"{name}.".startswith(f"{each}.") for each in allowed)
    ]
    if differing:
        both = [f"{name} was {saved.get(name)!r:.200} and is {here[name]!r:.200} here" for name in differing]
        raise ConfigError(
            f"state is of another run: {', '.join(both)}: batches would be others. Make the loader as it was, or go on "
            f"all the same with allow={differing!r}"
        )
    try:
        return plan.first_of_run(rank, epoch, step)
    except ConfigError as error:
        raise ConfigError(f"state: {error}; is epochs= smaller than it was, or the data set?") from error


def _flat(value: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its names joined by dots; an order is one value."""
    for name, each in value.items():
        if isinstance(each, Mapping) and name != "order":
            yield from _flat(each, f"{before}{name}.")
        else:
            yield f"{before}{name}", each


def _shortened(steps: list[str]) -> JSON:
    text = json.dumps(steps)
    return [*steps] if len(text) <= _MOST_CHARACTERS else xxhash.xxh3_128_hexdigest(text.encode())


def _describe_order(order: Order, epochs: int) -> JSON:
    written = write_order(order)
    if written is not None and len(text := json.dumps(written)) <= _MOST_CHARACTERS:
        return written
    if written is not None:
        return {"kind": type(order).__name__, "digest": xxhash.xxh3_128_hexdigest(text.encode())}
    digest = xxhash.xxh3_128()
    if isinstance(order, Explicit) and not callable(order.ids):
        lists: Any = order.ids
        for ids in lists:
            _add(digest, ids)
        return {"kind": "Explicit", "digest": digest.hexdigest()}
    for epoch in range(min(epochs, _EPOCHS)):
        length = order.length(epoch)
        for begin in range(0, length, _AT_ONCE):
            _add(digest, order.at(epoch, np.arange(begin, min(begin + _AT_ONCE, length))))
    return {"kind": type(order).__name__, "digest": digest.hexdigest()}


def _digest_source(source: Source) -> str:
    """Return a digest of sizes and labels, and of names where the source has them: not of where the files are."""
    digest = xxhash.xxh3_128()
    add = partial(_add, digest)
    add(source.sizes_bytes)
    labels: Any = source.labels
    for name in sorted(labels) if isinstance(labels, Mapping) else ():
        digest.update(str(name).encode())
        add(labels[name])
    if not isinstance(labels, Mapping):
        add(labels)
    add(getattr(source, "names", np.empty(0, np.uint8)))
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, array: ArrayLike) -> None:
    numbers = np.ascontiguousarray(array)
    digest.update(f"{numbers.dtype.str}{numbers.shape}".encode())
    digest.update(numbers.reshape(-1).view(np.uint8).data)
