"""A changed bit in other people's checkpoints is found, and where it is told."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.checkpoint.interop import seal as sealing
from penstock.checkpoint.interop.foreign import write_state
from penstock.checkpoint.interop.safetensors_files import map_safetensors
from penstock.checkpoint.interop.seal import CHUNK_BYTES, SUFFIX, check_seal, read_seal, seal
from penstock.errors import ConfigError, DataError, FormatError


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


def torch_file(folder: Path) -> Path:
    torch.save({"model": {"w": torch.arange(3000.0)}, "step": 3}, folder / "c.pt")
    return folder / "c.pt"


def safetensors_file(folder: Path) -> Path:
    write_state(folder / "m.safetensors", {"a": torch.arange(5.0), "b": torch.arange(7, dtype=torch.int8)})
    return folder / "m.safetensors"


@pytest.fixture(scope="module")
def dcp_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = tmp_path_factory.mktemp("dcp") / "step-5"
    state = {"model": {"w": torch.arange(3000.0), "b": torch.ones(3)}, "step": 5}
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def dcp_folder(dcp_original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dcp_original, tmp_path / "step-5"))


@pytest.mark.parametrize("make", [torch_file, safetensors_file])
def test_a_file_that_is_as_it_was_sealed_is_whole(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    sealed = seal(path)
    assert sealed.path == tmp_path / f"{path.name}{SUFFIX}"
    assert sealed.nbytes == path.stat().st_size
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, sealed.path.name])
    assert read_seal(sealed.path) == sealed
    assert check_seal(path).is_intact


@pytest.mark.parametrize("make", [torch_file, safetensors_file])
def test_every_flipped_bit_of_a_file_is_found(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    seal(path)
    size = path.stat().st_size
    for byte in {*range(0, size, max(1, size // 100)), size - 1}:
        flip(path, byte, byte % 8)
        (fault,) = check_seal(path).faults
        assert (fault.file, fault.wrong) == (path.name, "changed")
        assert fault.begin <= byte < fault.end
        flip(path, byte, byte % 8)
    assert check_seal(path).is_intact


def test_every_flipped_bit_in_a_folder_of_dcp_is_found(dcp_folder: Path) -> None:
    """What torch.distributed.checkpoint itself loads without a word."""
    sealed = seal(dcp_folder)
    names = [file.name for file in sealed.files]
    assert ".metadata" in names
    assert any(name.endswith(".distcp") for name in names)
    assert check_seal(dcp_folder).is_intact
    for name in names:
        size = (dcp_folder / name).stat().st_size
        for byte in (0, size // 3, size - 1):
            flip(dcp_folder / name, byte, 5)
            (fault,) = check_seal(dcp_folder).faults
            assert (fault.file, fault.wrong, fault.tensors) == (name, "changed", ())
            assert fault.begin <= byte < fault.end
            flip(dcp_folder / name, byte, 5)


def test_a_sealed_folder_is_still_one_that_dcp_loads(dcp_folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    seal(dcp_folder)
    state: dict[str, Any] = {"model": {"w": torch.zeros(3000), "b": torch.zeros(3)}, "step": 0}
    with warnings.catch_warnings(action="ignore"):  # that there is one process only
        load(state, checkpoint_id=str(dcp_folder), no_dist=True)
    assert state["step"] == 5


def test_what_is_missing_added_and_resized_is_told(dcp_folder: Path) -> None:
    (dcp_folder / "more").mkdir()
    (dcp_folder / "more" / "config.json").write_text("{}")
    (dcp_folder / "note").write_text("hello")
    sealed = seal(dcp_folder)
    data = next(file.name for file in sealed.files if file.name.endswith(".distcp"))
    (dcp_folder / "more" / "config.json").unlink()
    (dcp_folder / "more" / "other.json").write_text("{}")
    os.truncate(dcp_folder / data, 100)
    (dcp_folder / "note").write_text("hullo")
    faults = {fault.file: fault for fault in check_seal(dcp_folder).faults}
    assert {name: fault.wrong for name, fault in faults.items()} == {
        data: "resized",
        "more/config.json": "missing",
        "note": "changed",
        "more/other.json": "extra",
    }
    assert "it has 100 bytes, and had" in str(faults[data])


def test_the_tensor_of_a_safetensors_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "CHUNK_BYTES", 4096)
    path = tmp_path / "model" / "model.safetensors"
    write_state(path.parent, {name: torch.zeros(4096) for name in "abc"})
    header, _ = map_safetensors(path)
    seal(path.parent)
    flip(path, header.begins[1] + 9000)
    (fault,) = check_seal(path.parent).faults
    assert fault.tensors == ("b",)
    assert fault.end - fault.begin == 4096
    flip(path, header.begins[2] + 9000)
    flip(path, 20)
    (fault,) = check_seal(path.parent).faults
    assert fault.tensors[0] == "the header"
    assert "chunks within bytes 0 to" in str(fault)


def test_a_large_file_is_read_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    content = np.random.default_rng(5).integers(0, 256, 2 * CHUNK_BYTES + 17, np.uint8)
    content.tofile(path)
    sealed = seal(path)
    chunks = [content[begin : begin + CHUNK_BYTES].tobytes() for begin in range(0, content.size, CHUNK_BYTES)]
    assert sealed.files[0].digests == tuple(map(xxhash.xxh3_128_hexdigest, chunks))
    flip(path, CHUNK_BYTES)
    (fault,) = check_seal(path).faults
    assert (fault.begin, fault.end) == (CHUNK_BYTES, 2 * CHUNK_BYTES)


def test_empty_files_are_sealed(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "empty").touch()
    seal(tmp_path / "f")
    assert check_seal(tmp_path / "f").is_intact


def test_a_seal_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = torch_file(tmp_path)
    seal(path)
    flip(path, 100)
    with pytest.raises(ConfigError, match="is sealed already"):
        seal(path)
    assert not check_seal(path).is_intact
    seal(path, overwrite=True)
    assert check_seal(path).is_intact


def test_what_cannot_be_sealed_or_checked_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        seal(tmp_path / "gone.pt")
    with pytest.raises(ConfigError, match="no files"):
        seal(tmp_path)
    path = torch_file(tmp_path)
    with pytest.raises(ConfigError, match=r"has no seal, c\.pt\.penstock"):
        check_seal(path)
    with pytest.raises(FileNotFoundError, match="neither is a seal"):
        check_seal(tmp_path / "gone.pt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a plain file"):
        seal(tmp_path)
    assert not (tmp_path / SUFFIX).exists()
    seal(path)
    path.unlink()
    assert [fault.wrong for fault in check_seal(path).faults] == ["missing"]


def test_a_seal_of_another_file_is_no_seal(tmp_path: Path) -> None:
    path = torch_file(tmp_path)
    sealed = seal(path)
    sealed.path.rename(tmp_path / f"d.pt{SUFFIX}")
    path.rename(tmp_path / "d.pt")
    with pytest.raises(FormatError, match=r"not the seal of d\.pt"):
        check_seal(tmp_path / "d.pt")


def test_an_unreadable_file_is_one_fault_and_the_others_are_checked(dcp_folder: Path) -> None:
    (dcp_folder / "note").write_text("hello")
    seal(dcp_folder)
    (dcp_folder / "note").unlink()
    os.mkfifo(dcp_folder / "note")
    flip(dcp_folder / ".metadata", 9)
    assert [(fault.file, fault.wrong) for fault in check_seal(dcp_folder).faults] == [
        (".metadata", "changed"),
        ("note", "unreadable"),
    ]


def test_a_changed_byte_of_the_seal_is_found(tmp_path: Path) -> None:
    path = torch_file(tmp_path)
    sealed = seal(path)
    content = sealed.path.read_bytes()
    for byte in range(0, len(content) - 1, 3):
        sealed.path.write_bytes(content[:byte] + bytes([content[byte] ^ 4]) + content[byte + 1 :])
        with pytest.raises(FormatError, match="is damaged"):
            check_seal(path)
    for kept in range(0, len(content) - 1, 17):
        sealed.path.write_bytes(content[:kept])
        with pytest.raises(FormatError):
            check_seal(path)


HOSTILE: dict[str, Any] = {
    "no mapping": [],
    "another format": {"format": "other"},
    "a later version": {"version": 2},
    "no files": {"files": []},
    "files that are none": {"files": 3},
    "tiny chunks": {"chunk_bytes": 1},
    "huge chunks": {"chunk_bytes": 1 << 50},
    "chunks of a fraction": {"chunk_bytes": 4096.0},
    "a file that is none": {"files": ["c.pt"]},
    "a name that is none": {"name": 3},
    "a name above": {"name": "../c.pt"},
    "a name far above": {"name": "a/../../../etc/passwd"},
    "a name from the root": {"name": "/etc/passwd"},
    "an empty name": {"name": ""},
    "the folder": {"name": "."},
    "a name with a zero": {"name": "c\x00.pt"},
    "a name that is another": {"name": "./c.pt"},
    "a negative size": {"bytes": -1},
    "a huge size": {"bytes": 1 << 80},
    "more bytes than checksums": {"bytes": 1 << 40},
    "a checksum that is none": {"xxh3_128": ["no"]},
    "checksums that are none": {"xxh3_128": None},
}


parts_of_seals = st.sampled_from(["format", "version", "chunk_bytes", "files", "name", "bytes", "xxh3_128"])
any_json = st.recursive(
    st.none() | st.integers() | st.text() | st.floats(),
    lambda parts: st.lists(parts) | st.dictionaries(parts_of_seals, parts),
    max_leaves=8,
)


def written(path: Path, data: Any) -> None:
    body = json.dumps(data).encode() + b"\n"
    path.write_bytes(body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")


@for_each("how", HOSTILE)
def test_a_hostile_seal_is_a_format_error(tmp_path: Path, how: str) -> None:
    path = torch_file(tmp_path)
    sealed = seal(path)
    good = json.loads(b"\n".join(sealed.path.read_bytes().splitlines()[:-1]))
    change = HOSTILE[how]
    if isinstance(change, dict) and change.keys() <= good["files"][0].keys():
        good["files"][0] |= change
    elif isinstance(change, dict):
        good |= change
    else:
        good = change
    written(sealed.path, good)
    with pytest.raises(FormatError, match=SUFFIX):
        read_seal(sealed.path)


@given(any_json)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_for_a_seal_is_a_format_error(tmp_path: Path, data: Any) -> None:
    path = tmp_path / SUFFIX
    known = {"format": "penstock seal", "version": 1, "chunk_bytes": 4096, "files": data}
    for whole in (data, known, known | {"files": [{"name": "c", "bytes": data, "xxh3_128": data}]}):
        written(path, whole)
        with pytest.raises(FormatError):
            read_seal(path)


def test_a_seal_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = torch_file(tmp_path)

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DataError, match="No space left"):
        seal(path)
    assert os.listdir(tmp_path) == ["c.pt"]
