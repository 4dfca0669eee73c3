"""A state taken apart and put together again is the same, bit for bit; a hostile tree makes no more than an error."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.checkpoint.rebuilt import Tensor, load_into, tensors_of, unflatten
from tests.for_each import for_each

from penstock.checkpoint.state.dtypes import DTYPES
from penstock.checkpoint.state.flatten import Source, _boxes, flatten
from penstock.checkpoint.state.generators import random_state, set_random_state
from penstock.checkpoint.state.tensors import Layout
from penstock.checkpoint.state.tree import JSON, Framework, read_tree, select
from penstock.checkpoint.state.unflatten import plan_loading, plan_loading_into
from penstock.errors import ConfigError, FormatError

Point = namedtuple("Point", ["x", "y"])
TORCH_TYPES = [name for name in DTYPES if hasattr(torch, name)]
NUMPY_TYPES = [name for name in DTYPES if name in np.sctypeDict]


def through(state: Any, **options: Any) -> Any:
    """Return a state after its tree was text, and its tensors were copied."""
    flat = flatten(state)
    return unflatten(json.loads(json.dumps(flat.tree)), tensors_of(flat), **options)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are of the same types and bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            and isinstance(one, torch.nn.Parameter) == isinstance(other, torch.nn.Parameter)
            and torch_bytes(one) == torch_bytes(other)
        )
    if isinstance(one, (np.ndarray, np.generic)):
        return (
            isinstance(one, np.ndarray) == isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return (
            type(other) is dict
            and len(one) == len(other)
            and all(
                same(*keys) and same(*values)
                for keys, values in zip(
                    zip(one, other, strict=True), zip(one.values(), other.values(), strict=True), strict=True
                )
            )
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return type(other) is float and struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return type(other) is complex and same([one.real, one.imag], [other.real, other.imag])
    return type(one) is type(other) and bool(one == other)


def torch_bytes(tensor: torch.Tensor) -> bytes:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


# What comes back


@for_each("name", TORCH_TYPES)
def test_a_torch_tensor_of_any_type_comes_back_bit_for_bit(name: str) -> None:
    size = DTYPES[name].item_bytes
    draws = np.random.default_rng(7).integers(0, 2 if name == "bool" else 256, (6, 5, size), np.uint8)
    whole = torch.from_numpy(draws).view(getattr(torch, name)).reshape(6, 5)
    state = {
        "matrix": whole.clone(),
        "strided": whole.clone()[::2, 1::3],
        "transposed": whole.clone().t(),
        "scalar": whole[3, 2].clone(),
        "empty": torch.empty(0, 4, dtype=whole.dtype),
        "expanded": whole[:1].clone().expand(8, 5),
    }
    assert same(through(state), state)


@for_each("name", NUMPY_TYPES)
def test_a_numpy_array_of_any_type_comes_back_bit_for_bit(name: str) -> None:
    size = DTYPES[name].item_bytes
    draws = np.random.default_rng(8).integers(0, 2 if name == "bool" else 256, (6, 5 * size), np.uint8)
    whole = draws.view(name)
    state = {
        "matrix": whole.copy(),
        "strided": whole.copy()[::2, 1::3],
        "backwards": whole.copy()[::-1, ::-2],
        "fortran": np.asfortranarray(whole),
        "scalar": whole[3, 2],
        "of no dimension": whole[3, 2].reshape(()).copy(),
        "empty": np.empty((0, 4), name),
        "broadcast": np.broadcast_to(whole[0].copy(), (9, 5)),
        "big-endian": whole.astype(whole.dtype.newbyteorder(">")),
        "big-endian and strided": whole.astype(whole.dtype.newbyteorder(">"))[:, ::2],
    }
    assert same(through(state), state)


def test_plain_values_come_back_with_their_types_and_bits() -> None:
    quiet, loud = (
        struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0xFFF8DEADBEEF0001, 0x7FF0000000000001)
    )
    values = [
        *(None, True, False, 0, -1, 2**63 - 1, 2**63, -(2**63) - 1, 10**6000),
        *(0.0, -0.0, 5e-324, 0.1, math.inf, -math.inf, math.nan, quiet, loud, complex(-0.0, math.nan)),
        *("", "a/b~c", "\ud800", "\ud83d\ude00", "grün", "😀", "\x00", b"", b"\x00\xff", b"long" * 1000),
        *(
            np.float32(0.1),
            np.int8(-3),
            np.bool_(True),
            np.complex64(1 - 0j),
            np.float16("nan"),
            np.uint64(2**64 - 1),
        ),
        *(torch.Size([2, 0]), torch.bfloat16, torch.device("cuda", 3), torch.device("cpu"), torch.Size([])),
        *((), [], {}, (1, (2, [3])), [()], {"x": {}}),
    ]
    assert same(through(values), values)
    assert same(through({"deep": {"list": values}}), {"deep": {"list": values}})
    assert same(through(-0.0), -0.0)


def test_keys_keep_their_types_and_name_different_values_differently() -> None:
    tensors = (torch.full((1,), float(number)) for number in range(12))
    state = {
        "0": next(tensors),
        0: next(tensors),
        1: next(tensors),
        "a/b": {"c": next(tensors)},
        "a": {"b/c": next(tensors), "b": {"c": next(tensors)}},
        "~int:0": next(tensors),
        (1, "x"): next(tensors),
        None: next(tensors),
        0.5: next(tensors),
        b"k": 4,
        "\udfff": next(tensors),
        "": {"": next(tensors)},
    }
    assert same(through(state), state)
    names = [source.layout.name for source in flatten(state).sources]
    assert names[:6] == ["0", "~int:0", "1", "a~1b/c", "a/b~1c", "a/b/c"]
    assert len(set(names)) == 12
    assert all(name.isascii() for name in names)


def test_mappings_and_sequences_of_a_class_come_back_as_the_builtin_ones() -> None:
    state = {
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, x=[1]),
        "counter": Counter("aab"),
        "named": Point(1, torch.ones(2)),
    }
    back = through(state)
    assert same(back["ordered"], {"b": 1, "a": 2})
    assert same(back["default"], {"x": [1]})
    assert same(back["counter"], {"a": 2, "b": 1})
    assert same(back["named"], (1, torch.ones(2)))


def test_a_training_is_continued_by_what_comes_back() -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(1)
    model = (
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
        .double()
        .float()
    )
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    steps(model, optimizer, 3)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    saved = {name: part.state_dict() for name, part in parts.items()} | {"random": random_state()}
    back = through(saved)
    steps(model, optimizer, 3)

    other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    other_optimizer = torch.optim.AdamW(other.parameters(), amsgrad=True)
    other.load_state_dict(back["model"])
    other_optimizer.load_state_dict(back["optimizer"])
    torch.optim.lr_scheduler.OneCycleLR(other_optimizer, 0.1, total_steps=50).load_state_dict(
        back["schedule"]
    )
    other_optimizer.load_state_dict(back["optimizer"])
    set_random_state(back["random"])
    steps(other, other_optimizer, 3)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_every_random_generator_goes_on_from_where_it_was_saved() -> None:
    own, bits = torch.Generator().manual_seed(5), np.random.default_rng(6)

    def draws() -> tuple[Any, ...]:
        legacy = np.random.normal()  # noqa: NPY002
        return random.random(), legacy, torch.rand(3), torch.rand(2, generator=own), bits.normal()

    before = random_state()
    try:
        draws()
        saved = through({"all": random_state(), "own": own.get_state(), "bits": bits.bit_generator.state})
        expected = draws()
        set_random_state(saved["all"])
        own.set_state(saved["own"])
        bits.bit_generator.state = saved["bits"]
        assert same(draws(), expected)
        with pytest.raises(ConfigError, match="no state of random generators"):
            set_random_state({"python": saved["all"]["python"], "numpy": {"bit_generator": "MT19937"}})
    finally:
        set_random_state(before)


def test_all_arrays_come_back_as_one_frameworks_when_asked() -> None:
    state = {
        "t": torch.arange(6.0).t(),
        "n": np.arange(4)[::-1],
        "b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    }
    tied = np.arange(6.0)
    state |= {"whole": tied, "back": tied[::-1], "size": torch.Size([1]), "type": torch.int8}

    numpy = through(state, framework="numpy")
    assert numpy["t"].dtype == np.float32
    assert isinstance(numpy["n"], np.ndarray)
    assert numpy["b"].view(np.uint16).tolist() == [0x3FC0, 0x8000]
    assert (numpy["size"], numpy["type"]) == ((1,), "int8")
    as_torch = through(state, framework="torch")
    assert same(as_torch["n"], torch.arange(4).flip(0))
    assert same(as_torch["back"], torch.arange(6.0, dtype=torch.float64).flip(0))
    with pytest.raises(ConfigError, match="framework is 'jax'"):
        through(state, framework="jax")


# Shared memory


def test_tied_and_overlapping_tensors_come_back_sharing_memory_and_are_kept_once() -> None:
    weight, flat = torch.randn(4, 6), torch.arange(10.0)
    state = {
        "embed": weight,
        "head": torch.nn.Parameter(weight),
        "transposed": weight.t(),
        "row": weight[2],
        "bits": weight.view(torch.int32),
        "low": flat[:6],
        "high": flat[4:9],
        "numpy": flat.numpy()[5:],
    }
    flat_state = flatten(state)
    assert [(layout.name, layout.nbytes) for layout in flat_state.layouts] == [("embed", 96), ("low", 40)]
    back = through(state)
    assert same(back, state)

    back["embed"][2] = 7
    assert back["head"][2].tolist() == [7] * 6
    assert back["transposed"][:, 2].tolist() == [7] * 6
    assert back["row"].tolist() == [7] * 6
    assert back["bits"][2].tolist() == [0x40E00000] * 6
    back["low"][5] = -1
    assert (back["high"][1], back["numpy"][0]) == (-1, -1)


def test_pieces_of_one_tensor_share_it_whatever_lies_between_them() -> None:
    whole = torch.arange(20.0)
    state = {"whole": whole, "piece": whole[2:4], "far": whole[10:12], "farther": whole[18:]}
    assert [layout.name for layout in flatten(state).layouts] == ["whole"]
    back = through(state)
    back["whole"].zero_()
    assert all(not tensor.any() for tensor in back.values())


def test_memory_that_is_seen_as_several_types_is_kept_as_bytes() -> None:
    memory = torch.arange(12, dtype=torch.int16)
    state = {"low": memory[:8], "high": memory[4:].view(torch.float32)}
    (layout,) = flatten(state).layouts
    assert (layout.name, layout.dtype.name, layout.nbytes) == ("low", "uint8", 24)
    assert same(through(state), state)


def test_what_is_still_to_be_conjugated_or_negated_is_saved_as_its_value() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"numbers": numbers, "conjugate": numbers.conj(), "imaginary": numbers.conj().imag}
    assert state["imaginary"].is_neg()
    back = through(state)
    assert back["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert back["imaginary"].tolist() == [-2, 4]


def test_numpy_views_share_memory_again() -> None:
    base = np.arange(24.0).reshape(4, 6)
    state = {"row": base[1], "back": base[::-1], "part": base[1:3, ::2], "column": base[:, 3]}
    back = through(state)
    assert same(back, state)
    back["row"][:] = 5
    assert back["back"][2].tolist() == [5] * 6
    assert back["part"][0].tolist() == [5] * 3
    assert back["column"][1] == 5


def test_of_a_large_storage_only_what_is_seen_is_kept() -> None:
    storage, other = torch.zeros(1000, 1000), torch.zeros(1000, 1000)
    state = {
        "row": storage[3],
        "piece": storage[500:502, 4:7],
        "one": storage[5, 5],
        "columns": [other[:, 0], other[:, 7]],
        "comb": other[3, 1::7],
    }
    flat = flatten(state)
    numbers = [layout.values for layout in flat.layouts]
    assert numbers == [1000, 6, 1, 1000, 1000, 143]
    assert same(through(state), state)


def test_what_was_expanded_is_kept_once() -> None:
    state = {
        "mask": torch.ones(3, 1).expand(3, 1 << 40),
        "zero": np.broadcast_to(np.float32(0), (1 << 20, 1 << 20)),
    }
    flat = flatten(state)
    assert [layout.nbytes for layout in flat.layouts] == [12, 4]
    back = through(state)
    assert back["mask"].shape == (3, 1 << 40)
    assert back["zero"].shape == (1 << 20, 1 << 20)


def test_channels_last_is_kept_in_the_order_of_its_memory_without_a_copy() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (source,) = flatten({"w": image}).sources
    view = source.view()
    assert source.layout.shape == (2, 4, 5, 3)
    assert view is not None
    assert view.ctypes.data == image.data_ptr()
    assert through({"w": image})["w"].is_contiguous(memory_format=torch.channels_last)


def test_bytes_are_views_of_the_state_where_they_can_be() -> None:
    parameter, array = torch.nn.Parameter(torch.zeros(3)), np.zeros(2)
    views = [source.view() for source in flatten([parameter, array, torch.zeros(4)[::2]]).sources]
    with torch.no_grad():
        parameter.add_(1)
    array += 1
    now = [None if view is None else view.tobytes() for view in views]
    assert now == [np.ones(3, np.float32).tobytes(), np.ones(2).tobytes(), None]


# What is refused


def given_back() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def refusals() -> dict[str, tuple[Any, str]]:
    class Own:
        pass

    circle: list[Any] = []
    circle.append({"again": circle})
    deep: Any = 1
    for _ in range(120):
        deep = [deep]
    lazy = torch.nn.LazyLinear(3).weight
    return {
        "a function": (
            {"optimizer": {"state": {0: {"hook": len}}}},
            "optimizer/state/0/hook is a .*function.*len",
        ),
        "an object": ({"x": [Own()]}, "x/0 is a .*Own, which a snapshot does not hold: leave it out, or"),
        "a set": ({"x": {1, 2}}, "x is a set"),
        "an array of objects": ({"x": np.array([None])}, "x is a NumPy array of type object"),
        "an array of text": ({"x": np.array(["a"])}, "x is a NumPy array of type <U1"),
        "an array of times": ({"x": np.zeros(2, "datetime64[s]")}, "x is a NumPy array of type datetime64"),
        "a record": ({"x": np.zeros(2, "i4,i4")}, "x is a NumPy array of type"),
        "a long double": ({"x": np.zeros(2, np.longdouble)}, "x is a NumPy array of type float128"),
        "a mask": ({"x": np.ma.masked_equal([1, 2], 2)}, "x is a NumPy array with a mask"),
        "a time": ({"x": np.datetime64("2020-01-01")}, "x is a NumPy scalar of type datetime64"),
        "sparse": ({"x": torch.eye(2).to_sparse()}, "x is a tensor of layout sparse_coo"),
        "meta": ({"x": torch.empty(2, device="meta")}, "x is a tensor without numbers"),
        "given back": ({"x": given_back()}, "x is a tensor whose memory was given back"),
        "quantized": (
            {
                "x": torch.quantize_per_channel(
                    torch.ones(2, 2), torch.ones(2), torch.ones(2), 0, torch.quint4x2
                )
            },
            "x is a quantized tensor of type torch.quint4x2",
        ),
        "nested": (
            {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            "x is a .*Nested|x is a tensor of layout",
        ),
        "lazy": ({"x": lazy}, "x is a .*UninitializedParameter without a shape yet"),
        "a circle": ({"x": circle}, "x/0/again is a list that contains itself"),
        "too deep": (deep, "nested deeper than 100 levels"),
        "a key": ({"x": {frozenset(): 1}}, "a key of x is a frozenset"),
        "two keys of one name": ({"x": {math.nan: 1, float("nan"): 3}}, "x is a mapping in which two keys"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_a_snapshot_does_not_hold_is_named() -> None:
    for case, (state, told) in refusals().items():
        with pytest.raises(ConfigError) as caught:
            flatten(state)
        assert re.search(told, str(caught.value)), case


# Into a state that is there


def into(target: Any, state: Any, **options: Any) -> Any:
    flat = flatten(state)
    return load_into(target, json.loads(json.dumps(flat.tree)), tensors_of(flat), **options)


def test_a_state_is_loaded_in_place_wherever_its_arrays_lie() -> None:
    def state(seed: int) -> dict[str, Any]:
        draw = np.random.default_rng(seed)
        numbers = torch.from_numpy(draw.normal(size=(6, 8)))
        return {
            "plain": numbers.clone(),
            "parameter": torch.nn.Parameter(numbers.clone()),
            "strided": numbers.clone()[::2, 1::3],
            "transposed": numbers.clone().t(),
            "complex": torch.complex(numbers, -numbers)[1:, ::2],
            "half": numbers.to(torch.bfloat16)[:, 3],
            "numpy": draw.normal(size=(4, 4))[::-1, 1::2],
            "big-endian": draw.normal(size=3).astype(">f8"),
            "scalar": torch.tensor(draw.normal()),
            "empty": torch.empty(0, 3),
            "number": seed,
            "list": [seed, [seed]],
            "groups": [{"lr": seed, "weight": numbers[0].clone()}],
            "pair": (numbers[1].clone(), seed),
            "named": Point(numbers[2].clone(), seed),
            "empty mapping": {},
        }

    target, saved = state(1), state(2)
    arrays = {name: value for name, value in target.items() if isinstance(value, (torch.Tensor, np.ndarray))}
    parts = target["list"], target["groups"], target["groups"][0]["weight"], target["named"].x
    loading = into(target, saved)
    assert (loading.not_loaded, loading.not_found) == ((), ())
    assert all(target[name] is array for name, array in arrays.items())
    assert parts[0] is target["list"]
    assert parts[1] is target["groups"]
    assert parts[2] is target["groups"][0]["weight"]
    assert parts[3] is target["named"].x
    assert type(target["named"]) is Point
    target["named"], saved["named"] = tuple(target["named"]), tuple(saved["named"])
    assert same(target, saved)


def test_contiguous_memory_is_filled_directly_and_the_rest_through_one_buffer_each() -> None:
    weight = torch.zeros(4, 6)
    target = {
        "w": weight,
        "tied": weight,
        "t": torch.zeros(6, 4).t(),
        "n": np.zeros(3),
        "other": torch.zeros(2, 6),
    }
    source = torch.randn(4, 6)
    saved = {"w": source, "tied": source, "t": torch.randn(4, 6), "n": np.arange(3.0), "other": source[1:3]}
    flat = flatten(saved)
    loading = plan_loading_into(target, read_tree(flat.tree, flat.layouts))
    direct = {destination.layout.name: destination for destination in loading.destinations}
    assert {name: each.is_direct for name, each in direct.items()} == {"w": True, "t": False, "n": True}
    assert direct["w"].memory.ctypes.data == weight.data_ptr()
    for destination, tensor in zip(loading.destinations, tensors_of(flat), strict=True):
        destination.memory[:] = tensor.data
        destination.finish()
    loading.state()
    assert same(target, saved)


def test_a_model_and_its_optimizer_are_loaded_through_their_state_dicts() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    loading = into(
        {"model": other.state_dict(), "step": None}, {"model": model.state_dict(), "step": 4, "extra": 1}
    )
    assert torch.equal(model.weight, other.weight)
    assert loading.not_loaded == ("extra",)
    with pytest.raises(ConfigError, match=r"model is a mapping .*Linear in `into`: give its state_dict\(\)"):
        into({"model": other}, {"model": model.state_dict()})


def test_what_is_only_on_one_side_is_named() -> None:
    target = {"a": torch.zeros(2), "b": {"c": torch.zeros(2), 3: 1}, "l": [torch.zeros(1)], "m": {"x": 1}}
    saved = {
        "a": torch.ones(2),
        "b": {"d": torch.ones(2)},
        "l": [torch.ones(1), torch.ones(1)],
        "e": {"f": 1},
        "m": {},
    }
    loading = into(target, saved)
    assert loading.not_loaded == ("b/d", "l/1", "e/f")
    assert loading.not_found == ("b/c", "b/3", "m/x")
    assert same(
        target, {"a": torch.ones(2), "b": {"c": torch.zeros(2), 3: 1}, "l": [torch.ones(1)], "m": {"x": 1}}
    )


def test_only_what_is_chosen_is_loaded_wanted_and_checked() -> None:
    target: dict[str, Any] = {
        "model": {"a": torch.zeros(2), "new": torch.zeros(1)},
        "opt": {"a": torch.zeros(3), "gone": 1},
        "step": 0,
    }
    saved = {"model": {"a": torch.ones(2), "old": torch.ones(1)}, "opt": {"a": torch.ones(9)}, "step": 5}
    loading = into(target, saved, only=["model"])
    assert (loading.not_loaded, loading.not_found) == (("model/old",), ("model/new",))
    assert [each.layout.name for each in loading.destinations] == ["model/a"]
    assert target["model"]["a"].tolist() == [1, 1]
    assert target["step"] == 0


def test_where_there_is_none_anything_is_put() -> None:
    shared = torch.arange(4.0)
    target: dict[str, Any] = {"a": None, "b": torch.zeros(4), "deep": None, "n": None}
    loading = into(target, {"a": shared, "b": shared, "deep": {"x": [torch.ones(1)]}, "n": np.arange(2)})
    assert same(target, {"a": shared, "b": shared, "deep": {"x": [torch.ones(1)]}, "n": np.arange(2)})
    assert (loading.not_loaded, loading.not_found) == ((), ())


def test_types_that_numpy_has_not_are_loaded_into_their_bits() -> None:
    target = {"x": np.zeros(2, np.uint16)}
    into(target, {"x": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)})
    assert target["x"].tolist() == [0x3FC0, 0x8000]


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


MISMATCHES: tuple[tuple[Any, Any, str], ...] = (
    (
        torch.zeros(2),
        torch.ones(3),
        r"x is float32 of shape \(3,\) in the snapshot and float32 of shape \(2,\) in",
    ),
    (
        torch.zeros(2),
        torch.ones(2).half(),
        r"x is float16 of shape \(2,\) in the snapshot and float32 of shape",
    ),
    (torch.zeros(1).expand(2), torch.ones(2), "x has numbers that share memory"),
    (torch.zeros(2, device="meta"), torch.ones(2), "x has no memory of its own"),
    (given_back(), torch.ones(2), "x has no memory of its own"),
    (frozen(np.zeros(2)), np.ones(2), "x is read-only"),
    (torch.zeros(2), 3, "x is a plain value in the snapshot and a torch.Tensor in `into`"),
    (torch.zeros(2), {"y": 1}, "x is a mapping in the snapshot and a torch.Tensor"),
    ({"y": 1}, torch.ones(2), "x is an array in the snapshot and a dict"),
    ([torch.zeros(2)], torch.ones(2), "x is an array in the snapshot and a list"),
    ({"y": 1}, [1, 2], "x is a plain value in the snapshot and a dict"),
    (len, 3, "x is a plain value in the snapshot and a builtin_function"),
    (torch.zeros(5000), b"x" * 5000, "x is bytes in the snapshot and a torch.Tensor"),
)


@for_each(("target", "saved", "told"), MISMATCHES)
def test_what_does_not_fit_is_named_before_anything_is_changed(target: Any, saved: Any, told: str) -> None:
    first = torch.zeros(2)
    state = {"first": first, "n": 0, "x": target, "y": torch.zeros(1)}
    with pytest.raises(ConfigError, match=f"{told}.*; y is float32"):
        into(state, {"first": torch.ones(2), "n": 1, "x": saved, "y": torch.ones(3)})
    assert first.tolist() == [0, 0]
    assert state["n"] == 0


# Choosing by name


def test_names_are_chosen_by_patterns_and_by_what_they_lie_in() -> None:
    names = ["model/a", "model/b/0", "model2/a", "step"]
    assert select(names, ["model"]) == {"model/a", "model/b/0"}
    assert select(names, ["*/a", "step"]) == {"model/a", "model2/a", "step"}
    assert select(names, ["model?/*"]) == {"model2/a"}
    with pytest.raises(
        ConfigError, match=r"'modle' in it, and no name fits it; there are model/a, model/b/0, model2/a, step"
    ):
        select(names, ["model", "modle"])
    with pytest.raises(ConfigError, match="give a list"):
        select(names, "model")


def test_a_part_of_a_state_reads_only_its_tensors() -> None:
    shared = torch.arange(6.0)
    state = {
        "a": shared,
        "b": {"c": shared[2:], "d": torch.ones(2)},
        "list": [torch.zeros(1), 5, torch.ones(1)],
        "n": 1,
    }
    flat = flatten(state)
    loading = plan_loading(read_tree(flat.tree, flat.layouts), only=["b/c"])
    assert [each.layout.name for each in loading.destinations] == ["a"]
    assert same(through(state, only=["b/c"]), {"b": {"c": shared[2:]}})
    assert same(through(state, only=["list/2", "n"]), {"list": [None, None, torch.ones(1)], "n": 1})


# Any state, any tree

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(
        [np.float16(-0.0), np.uint8(9), np.complex128(1j), torch.Size([1]), torch.uint8, torch.device("cpu")]
    )
)
keys = (
    st.text(st.characters() | st.sampled_from("/~01"), max_size=4)
    | st.integers()
    | st.none()
    | st.binary(max_size=2)
)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Draw an array, torch's or NumPy's, maybe a view; several may share memory."""
    base = draw(st.sampled_from(BASES))
    view = np.asarray(base[tuple(draw(st.sampled_from(SLICES)) for _ in range(base.ndim))])
    if draw(st.booleans()):
        view = view.T
    if draw(st.booleans()):
        return torch.from_numpy(view) if min(view.strides, default=0) >= 0 else torch.from_numpy(view.copy())
    return view


SLICES = [slice(None), slice(1, None), slice(None, None, 2), slice(0, 0), slice(None, None, -1), 1]
BASES = [
    np.random.default_rng(seed).integers(0, 256, shape, np.uint8).view(dtype)
    for seed, (shape, dtype) in enumerate(
        [((4, 8), "float32"), ((3, 4, 8), "int16"), ((16,), "complex64"), ((2, 3), "u1")]
    )
]
states = st.recursive(
    scalars | arrays(),
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(keys, parts, max_size=4)
    ),
    max_leaves=16,
)


@given(states)
def test_any_state_comes_back_bit_for_bit(state: Any) -> None:
    flat = flatten(state)
    tree = json.loads(json.dumps(flat.tree))
    assert same(unflatten(tree, tensors_of(flat)), state)
    names = [layout.name for layout in flat.layouts]
    assert len(set(names)) == len(names)
    # What was loaded anew can be loaded into, and is then the same again.
    read = read_tree(tree, flat.layouts)
    if isinstance(state, dict):
        loading = load_into(unflatten(tree, tensors_of(flat)), tree, tensors_of(flat))
        assert loading.not_loaded == loading.not_found == ()
    assert len(set(read.names)) == len(read.names)


@given(st.lists(arrays(), min_size=2, max_size=4), st.integers(0, 200))
def test_any_arrays_that_share_a_byte_share_it_again(state: list[Any], value: int) -> None:
    back = through(state)
    for index, one in enumerate(state):
        for other_index, other in enumerate(state):
            ours, theirs = np.asarray(one), np.asarray(other)
            if np.shares_memory(ours, theirs):
                assert np.shares_memory(np.asarray(back[index]), np.asarray(back[other_index]))


def hostile() -> dict[str, JSON]:
    def view(**changes: Any) -> JSON:
        known = {"dtype": "float32", "shape": [2, 2], "strides": [8, 4], "offset": 0} | changes
        return {"array": {"of": "x", "kind": "torch", "view": known}}

    def array(**changes: Any) -> JSON:
        return {"array": {"of": "x", "kind": "torch"} | changes}

    deep: Any = None
    for _ in range(5000):
        deep = [deep]
    return {
        "no such tensor": array(of="y"),
        "a tensor's name that is none": array(of=["x"]),
        "an unknown kind": array(kind="jax"),
        "an unknown part": array(run="rm"),
        "a flag that is none": array(grad=1),
        "a gradient of integers": {"array": {"of": "i", "kind": "torch", "grad": True}},
        "a gradient in NumPy": array(kind="numpy", grad=True),
        "big-endian in torch": array(big_endian=True),
        "bytes that are numbers": array(kind="bytes"),
        "bytes twice": [{"array": {"of": "b", "kind": "bytes"}}, {"array": {"of": "b", "kind": "bytes"}}],
        "a view behind the end": view(offset=4),
        "a view before the beginning": view(offset=-4),
        "a view of large strides": view(strides=[1 << 40, 4]),
        "a view of huge strides": view(strides=[1 << 62, 1 << 62]),
        "a view beyond 64 bits": view(offset=1 << 70),
        "a view of too many numbers": view(shape=[1 << 62, 1 << 62], strides=[0, 0]),
        "a view of negative length": view(shape=[-1, 2]),
        "a view backwards": view(strides=[-8, 4], offset=8),
        "a view of too many dimensions": view(shape=[1] * 65, strides=[0] * 65),
        "a view of other dimensions": view(strides=[4]),
        "a view of fractions": view(shape=[2.0, 2]),
        "a view of truths": view(shape=[True, 2]),
        "a view of an unknown type": view(dtype="object"),
        "a view with a part missing": {"array": {"of": "x", "kind": "torch", "view": {"dtype": "float32"}}},
        "too deep": deep,
        "not a number": math.nan,
        "a bare number beyond 64 bits": 10**5000,
        "an integer of another writing": {"int": "1e9"},
        "a float of too few bits": {"float": "7ff8"},
        "a complex of three": {"complex": ["0" * 16] * 3},
        "text that is none": {"text": "ff"},
        "bytes of half a byte": {"bytes": "f"},
        "a lone surrogate": "\ud800",
        "a scalar of an unknown type": {"scalar": ["object", "00"]},
        "a scalar of too many bytes": {"scalar": ["float32", "00" * 400]},
        "a device with a path": {"device": "cuda:0/../.."},
        "an attribute of torch": {"dtype": "load"},
        "an attribute of torch with a dot": {"dtype": "os.system"},
        "a size of text": {"size": ["a"]},
        "two tags": {"map": {}, "tuple": []},
        "an unknown tag": {"__import__": "os"},
        "a list for a key": {"items": [[[1], 2]]},
        "a mapping for a key": {"items": [[{"map": {}}, 2]]},
        "equal keys": {"items": [[1, 2], [True, 3]]},
        "keys of one name": {
            "items": [[{"float": "7ff8000000000000"}, 2], [{"float": "7ff8000000000000"}, 3]]
        },
        "a pair of three": {"items": [[1, 2, 3]]},
        "a mapping that is a list": {"map": []},
        "a tuple that is text": {"tuple": "abc"},
    }


TENSORS = [
    Tensor(Layout("x", DTYPES["float32"], (2, 2)), np.zeros(16, np.uint8)),
    Tensor(Layout("i", DTYPES["int8"], (3,)), np.zeros(3, np.uint8)),
    Tensor(Layout("b", DTYPES["uint8"], (3,)), np.zeros(3, np.uint8)),
]


def test_a_hostile_tree_is_an_error() -> None:
    for what, tree in hostile().items():
        for whole in (tree, {"map": {"deep": {"tuple": [tree, {"array": {"of": "i", "kind": "numpy"}}]}}}):
            with pytest.raises(FormatError) as told:
                unflatten(whole, TENSORS)
            assert len(str(told.value)) < 400, what


def test_copies_that_a_tree_asks_for_do_not_fill_the_memory() -> None:
    tensor = Tensor(Layout("x", DTYPES["float32"], (1 << 16,)), np.zeros(1 << 18, np.uint8))
    view = {"dtype": "float32", "shape": [1 << 16], "strides": [-4], "offset": (1 << 18) - 4}
    many = [{"array": {"of": "x", "kind": "numpy", "view": view}}] * 100
    unflatten(many, [tensor])
    with pytest.raises(FormatError, match="too many arrays that would have to be copied"):
        unflatten(many, [tensor], framework="torch")
    with pytest.raises(FormatError, match="too many arrays"):
        unflatten([{"array": {"of": "x", "kind": "numpy", "big_endian": True}}] * 100, [tensor])


def test_two_tensors_of_one_name_are_an_error() -> None:
    layouts = [tensor.layout for tensor in TENSORS]
    with pytest.raises(FormatError, match="two tensors called x"):
        read_tree(None, [*layouts, Layout("x", DTYPES["int8"], (1,))])


WORDS = (
    "array of kind view dtype shape strides offset grad parameter big_endian x i b torch numpy bytes float32 int8 map "
    "items tuple size scalar device float text"
)
words = st.sampled_from(WORDS.split())
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-20, 20)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | words,
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(words | st.text(max_size=2), parts, max_size=4)
    ),
    max_leaves=12,
)


@given(states, st.data())
def test_a_tree_with_anything_in_any_place_is_read_or_is_a_format_error(
    state: Any, data: st.DataObject
) -> None:
    flat = flatten(state)
    tree = json.loads(json.dumps({"root": flat.tree}))
    holder, place = data.draw(st.sampled_from(list(places(tree))))
    known = [part for part in places(tree) if part[0] is not holder]
    new: JSON = data.draw(json_values)
    if known and data.draw(st.sampled_from([True, False])):
        # Another part of the same tree, where it does not belong.
        other, where = data.draw(st.sampled_from(known))
        new = json.loads(json.dumps(other[where]))
    holder[place] = new
    frameworks: tuple[Framework | None, ...] = (None, "numpy", "torch")
    for framework in frameworks:
        with contextlib.suppress(FormatError):
            unflatten(tree["root"], tensors_of(flat), framework=framework)


@given(json_values)
def test_any_json_is_read_or_is_a_format_error(tree: Any) -> None:
    with contextlib.suppress(FormatError):
        unflatten(tree, TENSORS)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every part of some JSON, as what holds it and where."""
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, (dict, list)):
        for place in tree if isinstance(tree, dict) else range(len(tree)):
            found += [(tree, place), *places(tree[place])]
    return found


# What outlives a process

GOLDEN = """{"map": {"model": {"map": {
  "w": {"array": {"of": "model/w", "kind": "torch", "parameter": true, "grad": true}},
  "t": {"array": {"of": "model/w", "kind": "torch",
        "view": {"dtype": "float32", "shape": [2, 2], "strides": [4, 8], "offset": 0}}}}},
 "opt": {"items": [[0, {"array": {"of": "opt/0", "kind": "numpy", "big_endian": true}}],
  ["~/", {"tuple": [null, true]}]]},
 "many": {"array": {"of": "many", "kind": "bytes"}},
 "rest": [{"int": "-0x10000000000000000"}, {"float": "fff0000000000000"}, {"complex": ["8000000000000000",
  "3ff0000000000000"]}, {"text": "eda080"}, {"bytes": "00ff"}, {"scalar": ["float32", "0000c03f"]}, {"size": [2, 0]},
  {"dtype": "bfloat16"}, {"device": "cuda:1"}, -0.0, 7, "x"]}}"""


def test_a_tree_that_was_written_once_is_read_for_ever_and_written_the_same() -> None:
    """A change here is a change of the format: old snapshots could not be read any more."""
    tensors = [
        Tensor(Layout("model/w", DTYPES["float32"], (2, 2)), np.array([1, -2, 3, 4], "<f4").view(np.uint8)),
        Tensor(Layout("opt/0", DTYPES["int16"], (2,)), np.array([3, -4], "<i2").view(np.uint8)),
        Tensor(Layout("many", DTYPES["uint8"], (1500,)), np.zeros(1500, np.uint8)),
    ]
    state = unflatten(json.loads(GOLDEN), tensors)
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    expected = {
        "model": {"w": weight, "t": weight.detach().t()},
        "opt": {0: np.array([3, -4], ">i2"), "~/": (None, True)},
        "many": bytes(1500),
        "rest": [
            *(-(2**64), -math.inf, complex(-0.0, 1), "\ud800", b"\x00\xff", np.float32(1.5)),
            *(torch.Size([2, 0]), torch.bfloat16, torch.device("cuda", 1), -0.0, 7, "x"),
        ],
    }
    assert same(state, expected)
    flat = flatten(expected)
    assert flat.tree == json.loads(GOLDEN)
    assert [layout.name for layout in flat.layouts] == ["model/w", "opt/0", "many"]
    assert read_tree(flat.tree, flat.layouts).names[:4] == ("model/w", "model/t", "opt/0", "opt/~0~1")


# On other devices, and of other classes


def test_what_lies_on_a_device_is_copied_from_its_storage() -> None:
    """As for a GPU; there, the copy crosses a link."""
    storage = torch.arange(12, dtype=torch.bfloat16)
    flat = flatten({"all": storage, "part": storage[4:], "strided": torch.arange(8.0)[::3]})
    for source in flat.sources:
        device = replace(source, is_on_host=False)
        assert device.view() is None
        out = np.zeros(source.layout.nbytes, np.uint8)
        device.copy_into(out)
        assert out.tobytes() == source.data().tobytes()
        assert device.data().tobytes() == out.tobytes()


@st.composite
def strided(draw: st.DrawFn) -> tuple[str, Any, bytes]:
    """Draw a view whose numbers lie anyhow, its type, and its bytes in C order as the framework makes them."""
    framework = draw(st.sampled_from(["numpy", "torch"]))
    name = draw(st.sampled_from(NUMPY_TYPES if framework == "numpy" else TORCH_TYPES))
    shape = draw(st.lists(st.integers(1, 6) | st.integers(0, 2), max_size=4))
    steps = [draw(st.sampled_from([1, 1, 2, 0, -1, -2])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    base = [length * abs(step) if step else 1 for length, step in zip(shape, steps, strict=True)]
    size = DTYPES[name].item_bytes
    draws = np.random.default_rng(draw(st.integers(0, 99)))
    values = draws.integers(0, 2 if name == "bool" else 256, math.prod(base) * size, np.uint8)
    if framework == "numpy":
        whole = values.view(name).reshape(base)
        if draw(st.booleans()):
            whole = whole.view(whole.dtype.newbyteorder(">"))
        every: Any = (*(slice(None, None, step or 1) for step in steps), ...)
        view = np.broadcast_to(whole[every], shape).transpose(order)
        return name, view, view.astype(view.dtype.newbyteorder("<")).tobytes()
    held = torch.empty(base, dtype=getattr(torch, name))
    if values.size:
        held.untyped_storage().copy_(torch.from_numpy(values).untyped_storage())
    every = (*(slice(None, None, abs(step) or 1) for step in steps), ...)
    tensor = held[every].expand(shape).permute(order)
    return name, tensor, torch_bytes(tensor)


@given(strided(), st.data())
def test_any_part_of_any_array_is_copied_as_it_is_in_the_whole(
    drawn: tuple[str, Any, bytes], data: st.DataObject
) -> None:
    name, array, expected = drawn
    layout = Layout("x", DTYPES[name], tuple(array.shape))
    begin, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, layout.values)])))
    place = slice(begin * layout.dtype.item_bytes, end * layout.dtype.item_bytes)
    # As what does not lie side by side in main memory, and as a device's.
    sources = [Source(layout, array, None, True)]
    if isinstance(array, torch.Tensor):
        sources.append(Source(layout, array, None, False))
        if array.is_contiguous():
            sources.append(Source(layout, array, array.data_ptr(), False))
    sources += flatten([array]).sources
    for source in sources[:-1]:
        out = np.full(place.stop - place.start, 0xA5, np.uint8)
        source.copy_into(out, place.start)
        assert out.tobytes() == expected[place]
    # The last may keep what is seen several times once, or in another order.
    whole = sources[-1].data()
    out = np.full(whole.size // 2 // 16 * 16, 0xA5, np.uint8)
    sources[-1].copy_into(out, whole.size - out.size)
    assert out.tobytes() == whole[whole.size - out.size :].tobytes()


def test_a_few_boxes_are_enough_for_any_part() -> None:
    """Numbers of a (3, 4, 5) cut at every two places, against their numbers in C order."""
    numbers = np.arange(60).reshape(3, 4, 5)
    for begin in range(60):
        for end in range(begin + 1, 61):
            boxes = [numbers[(*place, ...)].reshape(-1) for place in _boxes((3, 4, 5), begin, end)]
            assert np.concatenate(boxes).tolist() == list(range(begin, end))
            assert len(boxes) <= 2 * 3


def test_subclasses_that_keep_their_numbers_elsewhere_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(
        ConfigError, match=r"x is a .*FakeTensor, which keeps its numbers in a way of its own"
    ):
        flatten({"x": fake})

    class Plain(torch.Tensor):
        pass

    (back,) = through([torch.ones(2).as_subclass(Plain)])
    assert type(back) is torch.Tensor


def test_a_tensor_that_is_spread_over_ranks_is_left_to_the_writer_for_those() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        spread = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(
            ConfigError, match=r"model/w is a .*DTensor, .*with the writer of penstock\.torch"
        ):
            flatten({"model": {"w": spread}})
    finally:
        torch.distributed.destroy_process_group()
