"""Other people's checkpoints are read as they read them, and they read what is written."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.checkpoint.interop.exporting import open_readable
from penstock.checkpoint.interop.foreign import Readable, read_state, readable, write_state
from penstock.checkpoint.interop.safetensors_files import map_safetensors
from penstock.checkpoint.state.tree import Tree
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers import durable
from penstock.checkpoint.tiers.local import LocalTier
from penstock.errors import ConfigError, DataError, FormatError

THEIR_TYPES = sorted({dtype for dtype in safetensors.torch._TYPES.values() if dtype is not None}, key=str)


def model() -> dict[str, torch.Tensor]:
    """Return tensors of all types that both know, of odd sizes."""
    draw = torch.Generator().manual_seed(3)
    state: dict[str, torch.Tensor] = {
        f"layer.{str(dtype)[6:]}": torch.randint(
            0, 2, (3, 5, dtype.itemsize), generator=draw, dtype=torch.uint8
        )
        .view(dtype)
        .reshape(3, 5)
        for dtype in THEIR_TYPES
    }
    return state | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "grün/~": torch.ones(1)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.contiguous().reshape(-1).view(torch.uint8).tolist()
            == other.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(map(same, one.values(), other.values()))
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def nested() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {"a.weight": torch.nn.Parameter(weight), "b.weight": weight, "row": weight[1]},
        "optimizer": {
            "state": {0: {"step": 3, "m": np.arange(4.0)[::2]}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "image": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "loader": {"epoch": 1, "key": b"\x00" * 2000},
    }


# safetensors


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(model(), tmp_path / "m.safetensors", {"format": "pt"})
    state = read_state(tmp_path / "m.safetensors")
    assert same(dict(sorted(state.items())), dict(sorted(model().items())))
    numbers = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([True])}
    safetensors.numpy.save_file(numbers, tmp_path / "n.safetensors")
    assert same(read_state(tmp_path / "n.safetensors", framework="numpy"), numbers)


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    assert write_state(tmp_path / "m.safetensors", model()) == [tmp_path / "m.safetensors"]
    theirs = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert same(dict(sorted(theirs.items())), dict(sorted(model().items())))
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_file_is_mapped_and_only_what_is_used_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    size = 1 << 40
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    state = read_state(path)
    state["x"][size // 2] = 7
    assert state["x"][size // 2 - 1 : size // 2 + 2].tolist() == [0, 7, 0]
    assert read_state(path)["x"][size // 2] == 0


def test_tensors_at_odd_places_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x05" + np.array([1.5, -2], "<f4").tobytes())
    state = read_state(path)
    assert state["b"].tolist() == [1.5, -2]
    assert state["b"].data_ptr() % 4 == 0


def test_tied_weights_are_written_once_as_save_model_does(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    source = Tied()
    safetensors.torch.save_model(source, str(theirs))
    write_state(ours, source.state_dict())
    for path in (ours, theirs):
        state = read_state(path)
        assert set(state) == {"embed.weight", "head.weight"}
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        other = Tied()
        safetensors.torch.load_model(other, str(path))
        assert torch.equal(other.head.weight, source.head.weight)
    assert len(safetensors.torch.load_file(ours)) == 1


def test_a_nested_state_comes_back_from_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    write_state(path, nested())
    back = read_state(path)
    assert same(back, nested())
    assert isinstance(back["model"]["a.weight"], torch.nn.Parameter)
    assert back["model"]["a.weight"].data_ptr() == back["model"]["b.weight"].data_ptr()
    theirs = safetensors.torch.load_file(path)
    assert theirs["optimizer/state/0/m"].tolist() == [0, 2]
    assert theirs["image"].shape == (1, 2, 3, 4)
    assert theirs["model/row"].tolist() == [4, 5, 6, 7]


def test_a_part_is_written_under_its_own_names(tmp_path: Path) -> None:
    write_state(tmp_path / "m.safetensors", nested(), part="model")
    theirs = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert set(theirs) == {"a.weight", "row"}
    with pytest.raises(
        ConfigError, match=r"no mapping called 'modle' in the state; its values are model/a.weight"
    ):
        write_state(tmp_path / "m.safetensors", nested(), part="modle")


def test_a_type_that_safetensors_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deep/x is of type complex128, which safetensors has not"):
        write_state(tmp_path / "m.safetensors", {"deep": {"x": np.ones(1, np.complex128)}})
    with pytest.raises(ConfigError, match=r"__metadata__"):
        write_state(tmp_path / "m.safetensors", {"__metadata__": np.ones(1)})
    assert not list(tmp_path.iterdir())


def damaged() -> dict[str, bytes]:
    def file(header: Any, data: bytes = b"\x00" * 8) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def tensor(**changes: Any) -> Any:
        return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}

    return {
        "empty": b"",
        "cut in its length": b"\x01\x00",
        "a header longer than the file": struct.pack("<Q", 1 << 60) + b"{}",
        "no JSON": file(b"{not json"),
        "no UTF-8": file(b'{"\xff": 1}'),
        "a list": file([]),
        "a deep header": file(b'{"a":' * 100_000),
        "a name twice": file(
            b'{"x": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, '
            b'"x": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}'
        ),
        "two at one place": file(tensor() | {"y": tensor()["x"]}),
        "a hole": file(tensor() | {"y": tensor(data_offsets=[12, 20])["x"]}, b"\x00" * 20),
        "metadata that is no text": file({"__metadata__": {"a": 1}}),
        "no description": file({"x": 3}),
        "a part too many": file(tensor(more=1)),
        "an unknown type": file(tensor(dtype="F4")),
        "a type that is none": file(tensor(dtype=["F32"])),
        "a negative length": file(tensor(shape=[-2, -1])),
        "a fraction": file(tensor(shape=[2.0])),
        "too many dimensions": file(tensor(shape=[1] * 100 + [2])),
        "an overflow": file(tensor(shape=[1 << 62, 1 << 62, 0, 2])),
        "a place outside": file(tensor(data_offsets=[8, 16])),
        "a place of another size": file(tensor(data_offsets=[0, 4])),
        "bytes behind the end": file(tensor(), b"\x00" * 9),
        "cut in its tensors": file(tensor(), b"\x00" * 7),
        "a state that is no JSON": file({"__metadata__": {"penstock.state": "{"}, **tensor()}),
        "a state that is deep": file({"__metadata__": {"penstock.state": "[" * 100_000}, **tensor()}),
        "a state of other tensors": file(
            {"__metadata__": {"penstock.state": '{"array": {"of": "y", "kind": "torch"}}'}, **tensor()}
        ),
    }


@for_each("how", damaged())
def test_a_damaged_safetensors_file_is_an_error_that_names_it(tmp_path: Path, how: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(damaged()[how])
    with pytest.raises(DataError, match=r"m\.safetensors") as told:
        read_state(tmp_path / "m.safetensors")
    assert len(str(told.value)) < 600


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_with_any_byte_changed_is_read_or_is_an_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.safetensors"
    write_state(path, nested() | {"key": None}, overwrite=True)
    content = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    # DataError, and no other: a name of a type or device that there is not is damage as well.
    with contextlib.suppress(DataError):
        read_state(path)


# Hugging Face's folders


@pytest.fixture
def without_watched_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no thread that watches the progress bars of transformers, and stays."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("without_watched_bars")
def test_a_model_is_shared_out_over_files_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=8)
    source = GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    written = write_state(tmp_path, {"model": source.state_dict()}, part="model", shard_bytes=9_000)
    assert [path.name for path in written][-2:] == [
        "model-00004-of-00004.safetensors",
        "model.safetensors.index.json",
    ]
    assert all(path.stat().st_size < 13_000 for path in written)

    other = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, source.state_dict().values(), other.state_dict().values()))
    back = read_state(tmp_path)
    assert same(dict(sorted(back.items())), dict(sorted(source.state_dict().items())))
    with pytest.raises(ConfigError, match="has a model already, model-00001-of-00004"):
        write_state(tmp_path, back)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Exception ignored")  # safetensors' own mapping of the files
@pytest.mark.usefixtures("without_watched_bars")
def test_a_folder_of_transformers_is_read(tmp_path: Path) -> None:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    source = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=8))
    source.save_pretrained(tmp_path, max_shard_size="8KB")
    state = read_state(tmp_path)
    for name, tensor in source.state_dict().items():
        if name != "lm_head.weight":
            assert same(state[name], tensor), name


def test_a_small_model_is_one_file_of_a_new_folder(tmp_path: Path) -> None:
    (path,) = write_state(tmp_path / "new" / "folder", {"a": torch.ones(2)})
    assert path == tmp_path / "new" / "folder" / "model.safetensors"
    assert same(read_state(tmp_path / "new" / "folder"), {"a": torch.ones(2)})


@for_each(
    "weight_map",
    [
        {"a": "../secret.safetensors"},
        {"a": "/etc/x.safetensors"},
        {"a": 3},
        {"a": ["b"]},
        [],
        None,
        {"a": "x.bin"},
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match=r"index\.json"):
        read_state(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_state(tmp_path, {"a": torch.ones(200), "b": torch.ones(200)}, shard_bytes=800)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        read_state(tmp_path)


# torch.save and NumPy


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_torch_saves_is_read(tmp_path: Path, is_zip: bool) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}
    torch.save(state, tmp_path / "c.ckpt", _use_new_zipfile_serialization=is_zip)
    back = read_state(tmp_path / "c.ckpt")
    assert same(back["optimizer"], state["optimizer"])
    assert same(dict(back["model"]), dict(layer.state_dict()))
    assert back["step"] == 4


def test_torch_loads_what_is_written_without_running_code(tmp_path: Path) -> None:
    state: dict[Any, Any] = {**nested()} | {
        "scalar": np.float32(0.5),
        "size": torch.Size([2]),
        "type": torch.bfloat16,
        "big": 1 << 90,
    }
    state |= {"back": np.arange(3)[::-1], "swapped": np.arange(3, dtype=">i4"), 5: np.int64(6)}
    write_state(tmp_path / "c.pt", state)
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert same(back["optimizer"]["state"][0]["m"], torch.tensor([0.0, 2.0], dtype=torch.float64))
    assert same(back["back"], torch.tensor([2, 1, 0]))
    assert same(back["swapped"], torch.arange(3, dtype=torch.int32))
    assert same(dict(back["model"]), {name: part.detach() for name, part in nested()["model"].items()})
    assert back["model"]["a.weight"].data_ptr() == back["model"]["b.weight"].data_ptr()
    assert (back["scalar"], back["size"], back["type"], back["big"], back[5]) == (
        0.5,
        (2,),
        torch.bfloat16,
        1 << 90,
        6,
    )
    assert same(back["loader"], nested()["loader"])
    assert os.listdir(tmp_path) == ["c.pt"]


class Own:
    pass


def test_a_file_that_would_run_code_names_the_class_and_what_to_do(tmp_path: Path) -> None:
    torch.save({"model": torch.ones(1), "config": Own()}, tmp_path / "c.pt")
    with pytest.raises(ConfigError, match=r"c\.pt has a .*Own in it.*weights_only=False"):
        read_state(tmp_path / "c.pt")
    np.savez(tmp_path / "o.npz", a=np.array([Own()]))
    with pytest.raises(ConfigError, match=r"o\.npz has Python objects in it"):
        read_state(tmp_path / "o.npz")


def test_numpy_files_are_read(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"a": np.arange(6).reshape(2, 3), "b": np.array(2.5, np.float16)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    np.save(tmp_path / "weights.npy", arrays["a"])
    assert same(read_state(tmp_path / "a.npz", framework="numpy"), arrays)
    assert same(read_state(tmp_path / "weights.npy"), {"weights": torch.arange(6).reshape(2, 3)})


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@for_each("name", ["c.pt", "c.npz", "c.npy"])
@for_each(
    "content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00", b"\x93NUMPY\x01\x00v\x00{", b"hello", b"\x80\x04."]
)
def test_other_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=name.replace(".", r"\.")):
        read_state(tmp_path / name)


@pytest.mark.parametrize("name", ["c.pt", "c.npz", "c.npy"])
def test_files_that_are_cut_off_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "c.pt":
        torch.save({"a": torch.arange(1000.0)}, path)
    elif name == "c.npz":
        np.savez(path, a=np.arange(1000.0))
    else:
        np.save(path, np.arange(1000.0))
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 60, 10):
        path.write_bytes(whole[:kept])
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            read_state(path)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(b"HDF")
    with pytest.raises(ConfigError, match="ends with none of"):
        read_state(tmp_path / "x.h5")
    with pytest.raises(ConfigError, match="ends with none of"):
        write_state(tmp_path / "x.h5", {})
    with pytest.raises(ConfigError, match="has neither"):
        read_state(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match="dcp_to_torch_save"):
        read_state(tmp_path)
    for name in ("gone.pt", "gone.npz", "gone.safetensors"):
        with pytest.raises(FileNotFoundError, match="gone"):
            read_state(tmp_path / name)


# Snapshots, and what goes wrong on the way


def test_a_snapshot_is_written_with_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {f"w{number}": torch.full((1000,), float(number)) for number in range(9)},
        "step": 3,
    }
    with SnapshotStore(tmp_path / "store", report=None) as store:
        store.save(1, state)
        state["model"]["w1"] += 1
        store.save(2, state)
    with open_readable([LocalTier(tmp_path / "store")]) as (step, source):
        events: list[str] = []

        def read(name: str) -> Any:
            events.append(name)
            return source.read(name)

        written = write_state(tmp_path / "out", Readable(source.tree, read), part="model", shard_bytes=12_000)
    assert step == 2
    assert events == [f"model/w{number}" for number in range(9)]
    assert len(written) == 4
    assert same(read_state(tmp_path / "out"), state["model"])
    with (
        pytest.raises(ConfigError, match="no snapshot of step 7"),
        open_readable([LocalTier(tmp_path / "store")], 7),
    ):
        pass


def test_an_export_reads_the_next_copy_where_the_nearest_is_damaged_or_torn(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    state = {"a": torch.arange(500_000), "b": torch.arange(500_000) * 3, "c": torch.ones(5)}
    with SnapshotStore(slow, fast=fast, codec="stored", report=None) as store:
        for step in (1, 2):
            store.save(step, state | {"step": step}).wait()
    part = fast / "step-000000000001" / "part-00000.pst"
    data = bytearray(part.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    part.write_bytes(data)
    (fast / "step-000000000002" / "part-00000.pst").unlink()
    tiers = [LocalTier(fast), LocalTier(slow)]

    for step, wrong in ((1, "part-00000.pst is damaged"), (2, "part-00000.pst is missing")):
        told: list[str] = []
        with open_readable(tiers, step, report=told.append) as (_, source):
            assert all(
                source.read(name).tobytes() == tensor.numpy().tobytes() for name, tensor in state.items()
            )
        (line,) = told
        assert line.startswith(f"step {step} is read from another copy: {fast}/step-{step:012d}/{wrong}")

    (slow / "step-000000000002" / "part-00000.pst").unlink()
    with pytest.raises(FormatError, match=r"slow/step-000000000002/part-00000\.pst is missing"):
        open_readable(tiers).__enter__()


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_state(path, {"a": torch.ones(3)})
    source = readable({"a": torch.ones(3), "b": torch.ones(5)})

    def read(name: str) -> Any:
        if name == "b":
            raise DataError("the store is gone")
        return source.read(name)

    with pytest.raises(DataError, match="the store is gone"):
        write_state(path, Readable(source.tree, read), overwrite=True)
    assert same(read_state(path), {"a": torch.ones(3)})
    assert os.listdir(tmp_path) == ["m.safetensors"]
    with pytest.raises(DataError, match="cannot be written"):
        write_state(tmp_path / "missing" / "m.safetensors", {"a": torch.ones(3)})


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    replace, fsync = Path.replace, os.fsync

    def replaced(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    def synced(descriptor: int) -> None:
        events.append(
            "sync folder" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "sync file"
        )
        fsync(descriptor)

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(os, "fsync", synced)
    with durable.whole_file(tmp_path / "x") as file:
        file.write(b"1")
    assert events == ["sync file", "rename", "sync folder"]


def test_the_bytes_of_a_tensor_lie_where_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_state(path, {"a": torch.ones(3), "none": torch.empty(0), "b": torch.ones(2)})
    _, data = map_safetensors(path)
    assert data["b"].view("<f4").tolist() == [1, 1]
    assert isinstance(readable({}).tree, Tree)


@for_each(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"hello, junk", r"begin as a zip file or a pickle does: it begins with b'hello, j'"),
        (b"\x80\x02junkjunk", r"cannot be read to its end \(\w+: "),
        (b"PK\x03\x04junkjunk", r"cannot be read to its end \(PytorchStreamReader"),
    ],
)
def test_what_torch_did_not_write_is_told_by_what_it_is(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "junk.pt"
    path.write_bytes(data)

    with pytest.raises(DataError, match=rf"junk.pt .*{told}"):
        read_state(path)
