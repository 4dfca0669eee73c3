"""Where a run is, as a few readable numbers: what a loader saves, and what it resumes from.

A state is the next global step to consume, and what fixes the samples of every step and their bits: order, batch size,
data, transforms, decoder. It says nothing of ranks, threads, memory or policy, which change neither. JSON of less than
2 KB, equal on all ranks.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.loader.dataset import MapDataset
from penstock.loader.documents import PackedDocuments
from penstock.loader.source_samples import Mapped, MappedWithDraws, OverSource
from penstock.loader.transforms import Pipeline
from penstock.loader.transforms.decoders import choose_decoder, decoder_versions
from penstock.loader.transforms.foreign import Called
from penstock.loader.transforms.stages import name_of
from penstock.loader.user_code import digest_of_code, name_of_code
from penstock.plan import AccessPlan
from penstock.plan.orders import LARGEST_EPOCH, CutOrder, DescribedOrder, Order, even_from
from penstock.plan.serialise import write_order
from penstock.store import Numeric, PackedFiles, Selection, Source, labels_of
from penstock.store.mixing import Mixed
from penstock.trace.trace import JSON
from penstock.units import is_integer

if TYPE_CHECKING:  # which imports this
    from penstock.loader.config import LoaderConfig

#: Of the state's own form.
FORMAT = 1
#: Raise it when the same plan, file and transforms give other pixels than before.
_PIXELS = 1
#: An order that takes more characters is written as a digest.
_MOST_CHARACTERS = 400
#: Positions of an order that are digested at a time; and epochs of one that its code or a list knows alone.
_AT_ONCE, _EPOCHS = 1 << 20, 8
#: What a state has of how samples of a data set become batches.
_SAMPLES = "samples"
#: Of it, digests of the functions that make samples; and their names, for messages, which are not compared.
_FUNCTIONS, _FUNCTION_NAMES = f"{_SAMPLES}.functions", f"{_SAMPLES}.function_names"
#: By a decoder's name, that of its package where it is another.
_PACKAGES = {"opencv": "opencv-python-headless"}


def describe_run(
    plan: AccessPlan,
    source: Source | MapDataset,
    pipeline: Pipeline | None,
    data: dict[str, JSON] | None = None,
    draws_seed: int | None = None,
    *,
    config: LoaderConfig,
    as_array: Callable[[Any], NDArray[Any] | None],
    has_functions: bool = False,
) -> dict[str, JSON]:
    """Return what fixes which samples each global step has, and their bits.

    pipeline: None for a data set, whose own code makes the samples: of it, kind, length and `indices` are known.
    data: of `describe_data`, where that was asked before.
    draws_seed: of the generators that a data set asks for, where it does.
    config: of which mix_images, optional, ragged and padded count here.
    as_array: of the front end.
    has_functions: whether those count that make samples; not where ranks are compared before they save anything.
    """
    described: dict[str, JSON] = {
        "penstock": version("penstock"),
        "plan": {
            "samples": int(plan.samples),
            "batch_size": int(plan.batch_size) // (plan.ranks if plan.is_cut_by_order else 1),
            # Steps are counted in batches of all ranks: elsewhere ranks change nothing.
            **({"ranks": int(plan.ranks)} if plan.is_cut_by_order else {}),
            "drop_last": bool(plan.drop_last),
            "order": _describe_order(plan.order, plan.epochs),
        },
        "data": describe_data(source) if data is None else data,
    }
    if pipeline is not None:
        described["transforms"] = {
            "steps": _shortened([describe_object(step) for step in pipeline.transforms]),
            "seed": int(pipeline.seed),
            "dtype": pipeline.dtype,
            "layout": pipeline.layout,
            **(
                {} if (mix := config.mix_images) is None else {"mix": [describe_object(step) for step in mix]}
            ),
        }
        if pipeline.is_visual:
            described["pixels"] = describe_pixels()
        return described
    defaults = [
        f"{name}: {_describe_value(value, as_array)}" for name, value in (config.optional or {}).items()
    ]
    ragged = sorted(name for name, how in config.unequal.items() if how is None)
    padded = sorted(f"{name}: {how!r}" for name, how in config.unequal.items() if how is not None)
    of_samples = {"optional": sorted(defaults), "ragged": ragged, "padded": padded}
    if has_functions:
        functions = _functions_of(source)
        of_samples["functions"] = list(map(digest_of_code, functions))
        of_samples["function_names"] = [name_of_code(each, with_folder=False) for each in functions]
    described[_SAMPLES] = {name: _shortened(values) for name, values in of_samples.items()}
    if draws_seed is not None:
        described["draws"] = {"seed": int(draws_seed)}
    return described


def _functions_of(data: Any) -> list[Callable[..., Any]]:
    """Return the functions of `mapped` that make samples of a data set, the outermost first."""
    if isinstance(data, Mixed):
        return [each for source in data.sources for each in _functions_of(source)]
    if isinstance(data, PackedDocuments):
        return _functions_of(data.dataset)
    return [data.function, *_functions_of(data.source)] if isinstance(data, Mapped | MappedWithDraws) else []


def describe_pixels() -> dict[str, JSON]:
    """Return what decides which pixels a picture is decoded to here."""
    decoder = choose_decoder()
    found = decoder_versions().get(_PACKAGES.get(decoder, decoder), "")
    return {"decoder": f"{decoder} {found}".strip(), "form": _PIXELS}


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
    """Return the (epoch, step) at which a rank resumes from a state; (epochs, 0) is the end of the run.

    described: this run, by `describe_run`. allow: names of values that may differ, such as "pixels" or "plan.order".
        With another batch size the step is the one at which as many samples of the epoch were consumed.
    Raises: ConfigError if it is no state, is of a later Penstock or another run, or the plan has no such step.
    """
    here = dict(flat_values(described))
    _check_allowed(allow, here)
    state = _checked(state)
    saved = dict(flat_values(state))
    if _SAMPLES not in state:  # written by a Penstock that did not compare these
        here = {name: value for name, value in here.items() if not name.startswith(f"{_SAMPLES}.")}
    differing = [
        name for name in here if name != _FUNCTION_NAMES and not _is_same(saved.get(name), here[name])
    ]
    refused = [
        name
        for name in differing
        if not any(f"{name}.".startswith(f"{each}.") for each in ("penstock", *allow))
    ]
    if refused:
        both = [f"{name} was {_shown(name, saved)} and is {_shown(name, here)} here" for name in refused]
        raise ConfigError(
            f"state is of another run: {', '.join(both)}: batches would be others. Make the loader as it was, or go on "
            f"all the same with allow={[*allow, *refused]!r}"
        )
    epoch, step = state["epoch"], state["step"]
    if "plan.batch_size" in differing and not plan.is_cut_by_order:
        step, rest = divmod(step * saved["plan.batch_size"], plan.batch_size)
        if rest:
            raise ConfigError(
                f"state is {step * plan.batch_size + rest:,} samples into epoch {epoch}, and batches of "
                f"{plan.batch_size:,} do not end there: choose a batch_size that divides it"
            )
    if "plan.ranks" in differing:
        step, rest = divmod(step * saved.get("plan.ranks", 1), plan.ranks)
        if rest:
            raise ConfigError(
                f"state is {step * plan.ranks + rest:,} batches into epoch {epoch}, and steps of {plan.ranks} do not "
                "end there: choose a number of ranks that divides it"
            )
    try:
        return plan.first_of_run(rank, epoch, step)
    except ConfigError as error:
        raise ConfigError(f"state: {error}; are there fewer epochs or samples than there were?") from error


def seed_of_state(state: object) -> int | None:
    """Return the seed of a state's random transforms, or of its order; None where it names none."""
    for names in (("transforms", "seed"), ("draws", "seed"), ("plan", "order", "seed")):
        value: Any = state
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        if is_integer(value):
            return int(value)
    return None


def _check_allowed(allow: object, here: Collection[str]) -> None:
    """Raise ConfigError unless these are names of values, or of tables of them."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise ConfigError(f"allow is {allow!r}: give a list of names, such as [{allow or 'pixels'!r}]")
    for name in allow:
        if not any(f"{known}.".startswith(f"{name}.") for known in here):
            raise ConfigError(f"allow has {name!r}; the names there are: {', '.join(here)}")


def _checked(state: object) -> dict[str, Any]:
    """Return a state that has a place, in JSON's types. Raises: ConfigError."""
    if isinstance(state, str):
        raise ConfigError(f"state is text, {state!r:.40}: give json.loads of it")
    if not isinstance(state, Mapping) or "format" not in state:
        inside = " (its 'loader' is, perhaps)" if isinstance(state, Mapping) and "loader" in state else ""
        raise ConfigError(f"state is {state!r:.80}; it must be what a loader's state_dict() returned{inside}")
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(state)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"state has what a loader's state_dict() has not ({error}): it is damaged"
        ) from error
    if not is_integer(found["format"]) or found["format"] < 1:
        raise ConfigError(
            f"state has format {found['format']!r:.20}, which must be an integer of at least 1: it is damaged"
        )
    if found["format"] != FORMAT:
        raise ConfigError(
            f"state has the format {found['format']}, of Penstock {found.get('penstock')!r:.20}, and this one reads "
            f"{FORMAT}: resume with the Penstock that wrote it"
        )
    for name, place in (("epoch", found), ("step", found), ("batch_size", found.get("plan"))):
        number = place.get(name) if isinstance(place, dict) else None
        if not is_integer(number) or number < (name == "batch_size"):
            raise ConfigError(
                f"state has {name} {number!r:.20}, which must be an integer of at least "
                f"{int(name == 'batch_size')}: it is damaged, take another"
            )
    return found


def _shown(name: str, values: Mapping[str, Any]) -> str:
    """Return a value of a state for messages: of functions their names, too, as the code of one may have changed."""
    value, names = values.get(name), values.get(_FUNCTION_NAMES)
    if name != _FUNCTIONS or not isinstance(value, list) or not isinstance(names, list):
        return f"{value!r:.200}"
    return (
        ", ".join(f"{each} with the code {digest}" for each, digest in zip(names, value, strict=False))
        or "none"
    )


def _is_same(saved: Any, here: Any) -> bool:
    """Return whether two values are equal. Of two listed orders, one may list more epochs."""
    if isinstance(saved, dict) and isinstance(here, dict) and "epochs" in here:
        listed, known = saved.get("epochs"), here["epochs"]
        return (
            saved.get("kind") == here["kind"]
            and isinstance(listed, list)
            and all(map(operator.eq, listed, known))
        )
    return bool(saved == here)


def flat_values(value: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its names joined by dots; an order is one value."""
    for name, each in value.items():
        if isinstance(each, Mapping) and name != "order":
            yield from flat_values(each, f"{before}{name}.")
        else:
            yield f"{before}{name}", each


def describe_object(step: Any) -> str:
    """Return what is known of a transform or policy: of a function its name, of an object what it shows of itself."""
    step = step.step if isinstance(step, Called) else step
    if isinstance(step, partial):
        text = f"partial({describe_object(step.func)}, {step.args!r}, {step.keywords!r})"
    else:
        text = name_of(step) if hasattr(step, "__qualname__") else repr(step)
    return name_of(step) if text.startswith("<") else _without_addresses(text)


def _without_addresses(text: str) -> str:
    """Return what an object shows of itself less what is another in each process."""
    return re.sub(" at 0x[0-9a-f]+", "", text)


def _shortened(steps: list[str]) -> JSON:
    text = json.dumps(steps)
    return [*steps] if len(text) <= _MOST_CHARACTERS else xxhash.xxh3_128_hexdigest(text.encode())


def _describe_value(value: Any, as_array: Callable[[Any], NDArray[Any] | None]) -> str:
    """Return a default of `optional=` as it is written, or a digest of one that is an array or long."""
    array = as_array(value) if hasattr(value, "__array__") else None
    if array is None:
        text = _text_of(value)
        return text if len(text) <= _MOST_CHARACTERS else xxhash.xxh3_128_hexdigest(text.encode())
    digest = xxhash.xxh3_128(str(array.dtype).encode())  # of types that NumPy does not know it has the name
    add_array(digest, array)
    return digest.hexdigest()


def _text_of(value: Any) -> str:
    """Return what a value shows of itself in any process: a set has no order, and other objects an address."""
    if isinstance(value, dict):
        parts = [f"{_text_of(key)}: {_text_of(each)}" for key, each in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(map(_text_of, value))
    else:
        return _without_addresses(repr(value))
    if isinstance(value, set | frozenset):
        parts.sort()
    return f"{type(value).__name__}({', '.join(parts)})"


def _describe_order(order: Order, epochs: int) -> JSON:
    written = write_order(order)
    if written is not None and len(text := json.dumps(written)) <= _MOST_CHARACTERS:
        return written
    if written is not None:
        return {"kind": type(order).__name__, "digest": xxhash.xxh3_128_hexdigest(text.encode())}
    if isinstance(order, DescribedOrder):
        return order.describe()
    digests: list[JSON] = []
    # What cuts epochs into batches as they come may draw them from a sampler, which is not asked ahead.
    is_drawn = isinstance(order, CutOrder) and even_from(order) == LARGEST_EPOCH
    for epoch in range(1 if is_drawn else min(epochs, _EPOCHS)):
        digest, length = xxhash.xxh3_128(), order.length(epoch)
        if isinstance(order, CutOrder):
            add_array(digest, order.bounds(epoch, 1))
        for begin in range(0, length, _AT_ONCE):
            add_array(digest, order.at(epoch, np.arange(begin, min(begin + _AT_ONCE, length))))
        digests.append(digest.hexdigest())
    return {"kind": type(order).__name__, "epochs": digests}


def describe_data(source: Any) -> dict[str, JSON]:
    """Return a digest of names, sizes and labels, not of where files are; of a data set that of its `indices`.

    Of samples that share files it is of these files' names, in their order, and of where in them samples lie, too, or
    of which column they are. Of a selection it is of what that is of, and of which samples; of a mixture, of all that
    it is of; of the samples of a source, mapped or not, of that source, and of the fields that `TarSamples` have; of
    packed documents, of the data set that these are of, too.
    """
    digest, kind = xxhash.xxh3_128(), type(source).__name__
    if isinstance(source, Mixed):
        for each in map(describe_data, source.sources):
            digest.update(repr(sorted(each.items())).encode())
        return {"kind": kind, "names_sizes_labels": digest.hexdigest()}
    if isinstance(source, OverSource):
        described, fields = describe_data(source.source), source.described
        more: dict[str, JSON] = {"fields": _shortened(fields)} if fields else {}
        return described | {"kind": f"{kind} of {described['kind']}"} | more
    if isinstance(source, PackedDocuments):
        return {
            "kind": kind,
            "indices": source.packing.digest(),
            "documents": describe_data(source.dataset),
            "field": source.field,
            "pad": int(source.pad),
        }
    if not isinstance(source, Source):
        indices = np.asarray(getattr(source, "indices", ()))  # as PyTorch's Subset has them
        if indices.ndim != 1 or not indices.size or indices.dtype.kind not in "iu":
            return {"kind": kind}
        add_array(digest, indices.astype(np.int64))
        return {"kind": kind, "indices": digest.hexdigest()}
    if isinstance(source, Selection):
        described = describe_data(source.source)
        if source.is_everything:
            return described
        digest.update(str(described["names_sizes_labels"]).encode())
        add_array(digest, source.ids)
        return {"kind": f"Selection of {described['kind']}", "names_sizes_labels": digest.hexdigest()}
    add_array(digest, source.sizes_bytes)
    labels = labels_of(source.labels, len(source))
    for name, array in sorted(labels.items()) if isinstance(labels, dict) else [("", labels)]:
        digest.update(name.encode())
        add_array(digest, array)
    add_array(digest, getattr(source, "names", np.empty(0, np.uint8)))
    if isinstance(source, Numeric):
        numbers = source.numbers
        digest.update(repr((numbers.dtype, numbers.shape, numbers.batch_dtype)).encode())
    facts = getattr(source, "facts", "")
    if isinstance(facts, str) and facts:  # a source of one's own may call something else so
        digest.update(repr(facts).encode())
    if isinstance(source, PackedFiles):
        digest.update("\0".join(source.file_names()).encode("utf-8", "surrogateescape"))
        if source.catalog is not None and source.catalog.packed is not None:
            add_array(digest, source.catalog.counts)
            add_array(digest, source.catalog.packed.offsets)
    return {"kind": kind, "names_sizes_labels": digest.hexdigest()}


def add_array(digest: xxhash.xxh3_128, array: ArrayLike) -> None:
    """Add numbers, their type and their shape to a digest."""
    numbers = np.ascontiguousarray(array)
    digest.update(f"{numbers.dtype.str}{numbers.shape}".encode())
    digest.update(numbers.reshape(-1).view(np.uint8).data)
