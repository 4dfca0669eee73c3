"""Arrays that are no plain numbers: quantised tensors of torch, byte strings of NumPy."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.rebuilt import tensors_of, unflatten
from tests.checkpoint.snapshot_files import opened
from tests.for_each import for_each

from penstock.checkpoint.interop.foreign import read_state
from penstock.checkpoint.state.flatten import Shard, flatten
from penstock.checkpoint.state.tree import read_tree
from penstock.cli.main import main
from penstock.errors import ConfigError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning")


def quantised() -> dict[str, torch.Tensor]:
    """Return one tensor of each type and scheme that torch quantises by."""
    numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zeros, points = torch.zeros(4, dtype=torch.int64), torch.tensor([1, 2, 3, 4])
        scales = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64)
        pictures = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return {
            "quint8": torch.quantize_per_tensor(numbers, 0.1, 10, torch.quint8),
            "qint8": torch.quantize_per_tensor(numbers, 1 / 3, -3, torch.qint8),
            "qint32": torch.quantize_per_tensor(numbers, 1e-7, 0, torch.qint32),
            "channels": torch.quantize_per_channel(numbers, scales, zeros, 0, torch.qint8),
            "with zero points": torch.quantize_per_channel(numbers[:, :4], scales, points, 1, torch.quint8),
            "float zero points": torch.quantize_per_channel(
                numbers, scales.float(), points.float() / 7, 0, torch.quint8
            ),
            "channels last": torch.quantize_per_tensor(pictures, 0.05, 1, torch.qint8),
            "scalar": torch.quantize_per_tensor(torch.tensor(0.5), 0.5, 0, torch.qint8),
            "empty": torch.quantize_per_tensor(torch.zeros(0, 3), 0.5, 0, torch.qint8),
        }


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with torch's own view of what is in a quantised tensor."""
    assert found.is_quantized
    assert (found.dtype, found.qscheme()) == (expected.dtype, expected.qscheme())
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert torch.equal(found.int_repr(), expected.int_repr())
    if expected.qscheme() is torch.per_tensor_affine:
        assert (found.q_scale(), found.q_zero_point()) == (expected.q_scale(), expected.q_zero_point())
    else:
        assert found.q_per_channel_axis() == expected.q_per_channel_axis()
        for name in ("q_per_channel_scales", "q_per_channel_zero_points"):
            own, other = getattr(found, name)(), getattr(expected, name)()
            assert own.dtype == other.dtype
            assert torch.equal(own, other)
    assert torch.equal(found.dequantize(), expected.dequantize())


@pytest.mark.parametrize("codec", ["stored", "balance"])
def test_quantised_tensors_come_back_bit_for_bit(folder: Path, codec: str) -> None:
    expected = quantised()
    with opened(folder, codec=codec) as store:
        for step in (1, 2):
            store.save(step, {"model": expected, "type": torch.qint8}).wait()
        restored = store.restore()

    assert restored["type"] is torch.qint8
    for name, tensor in expected.items():
        assert_same(restored["model"][name], tensor)


def test_the_weights_of_a_quantised_linear_layer_come_back(folder: Path) -> None:
    """Its state dict has them in a tuple."""
    weight = quantised()["channels"]
    state = {"_packed_params._packed_params": (weight, torch.randn(4)), "scale": torch.tensor(1.0)}
    with opened(folder) as store:
        store.save(1, {"fc": state})
        restored = store.restore()["fc"]
    assert_same(restored["_packed_params._packed_params"][0], weight)


def test_two_views_of_a_quantised_tensor_share_memory_again() -> None:
    whole = quantised()["qint8"]
    state = {"whole": whole, "rows": whole[1:3], "again": whole}
    flat = flatten(state)

    assert [source.layout.nbytes for source in flat.sources] == [24]
    found = unflatten(flat.tree, tensors_of(flat))
    assert_same(found["rows"], state["rows"])
    assert found["rows"].data_ptr() == found["whole"].data_ptr() + 6


def test_a_quantised_tensor_is_loaded_into_another_and_replaced_where_its_scales_differ(folder: Path) -> None:
    expected = quantised()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alike = torch.quantize_per_tensor(torch.zeros(4, 6), 0.1, 10, torch.quint8)
        other = torch.quantize_per_tensor(torch.zeros(4, 6), 0.25, 0, torch.qint8)
    into: dict[str, Any] = {"alike": alike, "parts": (other, 1)}
    with opened(folder) as store:
        store.save(1, {"alike": expected["quint8"], "parts": (expected["qint8"], 1)})
        restored = store.restore(into=into)
        assert restored.replaced == ("parts/0",)
        with pytest.raises(ConfigError, match=r"alike is quint8 of shape \(4, 6\) .* and uint8 of shape"):
            store.restore(into={"alike": torch.zeros(4, 6, dtype=torch.uint8)}, only=["alike"])
        with pytest.raises(ConfigError, match=r'alike is a quantised tensor of quint8.* framework="torch"'):
            store.restore(framework="numpy")
    assert into["alike"] is alike
    assert_same(alike, expected["quint8"])
    assert_same(into["parts"][0], expected["qint8"])


def texts() -> dict[str, np.ndarray[Any, Any]]:
    names = np.array([b"n01440764", b"", b"a\x00b", b"\xff" * 12])
    return {
        "names": names,
        "every second, backwards": names[::-2],
        "scalar": np.array(b"abc", "S5"),
        "turned": np.array([[b"a", b"bc"], [b"d", b"e"], [b"f", b""]]).T,
        "empty": np.zeros((0, 2), "S4"),
    }


@pytest.mark.parametrize("framework", [None, "numpy", "torch"])
def test_byte_strings_come_back_bit_for_bit(folder: Path, framework: Any) -> None:
    with opened(folder) as store:
        for step in (1, 2):
            store.save(step, {"texts": texts(), "one": np.bytes_(b"x\x00y")}).wait()
        restored = store.restore(framework=framework)

    assert type(restored["one"]) is np.bytes_
    assert restored["one"] == b"x\x00y"
    for name, array in texts().items():
        found = restored["texts"][name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape), name
        assert found.tobytes() == array.tobytes(), name


def test_byte_strings_are_loaded_into_those_that_are_there(folder: Path) -> None:
    expected = texts()
    into = {name: np.zeros_like(array) for name, array in expected.items()}
    targets = dict(into)
    with opened(folder) as store:
        store.save(1, expected)
        store.restore(into=into)
        with pytest.raises(
            ConfigError, match=r"names is bytes96 of shape \(4,\) in the snapshot and bytes24"
        ):
            store.restore(into={"names": np.zeros(4, "S3")}, only=["names"])
    for name, array in expected.items():
        assert into[name] is targets[name]
        assert into[name].tobytes() == array.tobytes()


def test_both_go_through_a_file_of_safetensors(folder: Path, tmp_path: Path) -> None:
    tensor = quantised()["channels"]
    with opened(folder) as store:
        store.save(1, {"weight": tensor, "names": texts()["names"]})
    file = tmp_path / "out.safetensors"

    assert main(["snapshots", "export", str(folder), str(file)]) == 0

    state = read_state(file)
    assert_same(state["weight"], tensor)
    assert state["names"].tolist() == texts()["names"].tolist()
    assert main(["snapshots", "export", str(folder), str(tmp_path / "out.pt")]) == 1


@pytest.mark.parametrize("array", [quantised()["qint8"], texts()["names"]], ids=["quantised", "text"])
def test_a_part_of_one_is_refused(array: Any) -> None:
    with pytest.raises(ConfigError, match="a is a Shard of byte strings or of a quantised tensor"):
        flatten({"a": Shard(array, tuple(array.shape), (0,) * array.ndim)})


WRONG_QUANTIZERS: dict[str, list[Any]] = {
    "dtype": ["qint9", "quint8", None, 3],
    "axis": [2, -1, True, "0", None],
    "scales": ["", "00", "0" * 32, 3, None],
    "zero_points": [[], [0], [0.5] * 4, "0" * 16, [2**64] * 4, None],
    "more": [1],
}


@for_each(
    ("field", "wrong"),
    [(field, wrong) for field, all_wrong in WRONG_QUANTIZERS.items() for wrong in all_wrong],
)
def test_a_quantizer_that_cannot_be_is_refused(field: str, wrong: Any) -> None:
    flat = flatten({"a": quantised()["channels"]})
    tree = json.loads(json.dumps(flat.tree))
    read_tree(tree, flat.layouts)
    tree["map"]["a"]["array"]["quantized"][field] = wrong

    with pytest.raises(FormatError):
        read_tree(tree, flat.layouts)


@for_each(
    "change",
    [{"text_bytes": 11}, {"text_bytes": -1}, {"text_bytes": True}, {"kind": "torch"}, {"big_endian": True}],
)
def test_byte_strings_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    flat = flatten({"a": texts()["names"]})
    tree = json.loads(json.dumps(flat.tree))
    read_tree(tree, flat.layouts)
    tree["map"]["a"]["array"] |= change

    with pytest.raises(FormatError):
        read_tree(tree, flat.layouts)
