"""A state taken apart and put together again is the same, bit for bit; a hostile tree makes no more than an error."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from penstock.checkpoint.dtypes import DTYPES
from penstock.checkpoint.generators import random_state, set_random_state
from penstock.checkpoint.loading import unflatten
from penstock.checkpoint.state import flatten
from penstock.errors import ConfigError

Point = namedtuple("Point", ["x", "y"])
TORCH_TYPES = [name for name in DTYPES if hasattr(torch, name)]
NUMPY_TYPES = [name for name in DTYPES if name in np.sctypeDict]


def through(state: Any, **options: Any) -> Any:
    """Return a state after its tree was text, and its tensors were copied."""
    flat = flatten(state)
    return unflatten(json.loads(json.dumps(flat.tree)), flat.tensors, **options)


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
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


# What comes back


@pytest.mark.parametrize("name", TORCH_TYPES)
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


@pytest.mark.parametrize("name", NUMPY_TYPES)
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


REFUSED = (
    *(
        "a function",
        "an object",
        "a set",
        "an array of objects",
        "an array of text",
        "an array of times",
        "a record",
    ),
    *(
        "a long double",
        "a mask",
        "a time",
        "sparse",
        "meta",
        "quantized",
        "nested",
        "lazy",
        "a circle",
        "too deep",
    ),
    *("a key", "two keys of one name"),
)


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
        "quantized": (
            {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
            "x is a quantized tensor of type torch.qint8",
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
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_snapshot_does_not_hold_is_named(case: str) -> None:
    cases = refusals()
    assert tuple(cases) == REFUSED
    state, told = cases[case]
    with pytest.raises(ConfigError, match=told):
        flatten(state)
