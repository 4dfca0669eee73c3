"""Other people's checkpoints: read into a state, and written from one.

| what | read | written |
|---|---|---|
| `.safetensors` | mapped into memory | tensor by tensor |
| a folder with `model.safetensors` or shards and `model.safetensors.index.json` (Hugging Face) | so | so |
| `.pt`, `.pth`, `.bin`, `.ckpt` (torch.save) | with `weights_only=True`: no code is run | with what that reads |
| `.npy`, `.npz` | without pickled objects | no |

A mapping of arrays becomes the tensors of a safetensors file under its keys. Of any other state each array is a tensor
under its name in the state ("optimizer/state/0/exp_avg"), and the nesting and the plain values are kept in the file's
metadata, from where `read_state` takes them. An array that is another one (tied weights) is written once, and the
metadata says so, as safetensors' own `save_model` does; arrays that overlap otherwise are each written whole.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.checkpoint.interop.safetensors_files import Entry, map_safetensors, write_safetensors
from penstock.checkpoint.state.flatten import flatten, memory_at
from penstock.checkpoint.state.tensors import Bytes, Layout
from penstock.checkpoint.state.tree import (
    ArrayLeaf,
    Framework,
    MappingNode,
    Tree,
    describe_full,
    part_of,
    read_tree,
    write_node,
)
from penstock.checkpoint.state.unflatten import plan_loading
from penstock.checkpoint.tiers.durable import whole_file
from penstock.errors import ConfigError, DataError, FormatError

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin", ".ckpt")
NUMPY = (".npy", ".npz")
#: Hugging Face's names.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The file's metadata with the nesting of the state.
_TREE = "penstock.state"
_MOST_INDEX_BYTES = 100_000_000
_SHARD = re.compile(r"[A-Za-z0-9_.-]{1,200}\.safetensors")
#: What a file of torch.save begins with, of the newer and of the older of its formats.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_UNSAFE = re.compile(r"GLOBAL (\S+)")


@dataclass(frozen=True, slots=True)
class Readable:
    """A state that can be read tensor by tensor. read: returns a tensor's bytes, by its name."""

    tree: Tree
    read: Callable[[str], Bytes]


def readable(state: Any) -> Readable:
    """Return a state in memory as one to be read.

    Raises: ConfigError naming a value that a snapshot does not hold.
    """
    flat = flatten(state)
    sources = {source.layout.name: source for source in flat.sources}
    return Readable(read_tree(flat.tree, flat.layouts), lambda name: sources[name].data())


# Reading


def read_state(path: str | Path, *, framework: Framework = "torch") -> Any:
    """Return the state in other people's checkpoint; which kind it is follows from its name.

    framework: of the arrays of a file that does not say; what torch.save wrote is always PyTorch's.
    Raises: ConfigError if the kind is not known, or reading it would run code; DataError naming the file if it is
        damaged; FileNotFoundError.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    if path.is_dir():
        return _read_folder(path, framework)
    suffix = path.suffix.lower()
    if suffix == SAFETENSORS:
        return _read_safetensors([path], framework)
    if suffix in TORCH:
        return _read_torch(path)
    if suffix in NUMPY:
        return _read_numpy(path, framework)
    known = ", ".join((SAFETENSORS, *TORCH, *NUMPY))
    raise ConfigError(
        f"{path} has a name that ends with none of {known}: what kind of checkpoint it is is not known"
    )


def _read_folder(folder: Path, framework: Framework) -> Any:
    index = folder / INDEX
    if index.exists():
        return _read_safetensors([folder / name for name in _shards(index)], framework)
    if (folder / SINGLE).exists():
        return _read_safetensors([folder / SINGLE], framework)
    if (folder / ".metadata").exists():
        raise ConfigError(
            f"{folder} was written by torch.distributed.checkpoint, which keeps its index as a pickle: convert it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and read that file"
        )
    raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}: name a file in it")


def _shards(index: Path) -> list[str]:
    try:
        if index.stat().st_size > _MOST_INDEX_BYTES:
            raise DataError(f"{index} is larger than any index of a checkpoint")
        listed = json.loads(index.read_text())["weight_map"]
        names = sorted(set(listed.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index} is damaged: {str(error)[:200]}") from None
    for name in names:
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise DataError(f"{index} names {str(name)[:200]!r}, which is no shard in its folder")
    return names


def _read_safetensors(paths: list[Path], framework: Framework) -> Any:
    memory: dict[str, Bytes] = {}
    layouts: list[Layout] = []
    metadata: dict[str, str] = {}
    for path in paths:
        header, data = map_safetensors(path)
        twice = memory.keys() & data.keys()
        if twice:
            raise DataError(f"{path}: {min(twice)[:200]} is also in another shard")
        # Old files do not begin their tensors where a processor likes to read them.
        for layout, begin in zip(header.layouts, header.begins, strict=True):
            if begin % layout.dtype.item_bytes:
                data[layout.name] = data[layout.name].copy()
        memory |= data
        layouts += header.layouts
        metadata |= header.metadata
    where = paths[0] if len(paths) == 1 else paths[0].parent
    try:
        tree = read_tree(_tree_of(layouts, metadata, framework), layouts)
        return plan_loading(tree, memory=memory).state()
    except FormatError as error:
        raise DataError(f"{where} is damaged: {error}") from error


def _tree_of(layouts: list[Layout], metadata: Mapping[str, str], framework: Framework) -> Any:
    if _TREE in metadata:
        try:
            return json.loads(metadata[_TREE])
        except (ValueError, RecursionError) as error:
            raise FormatError(f"the state in its metadata is no JSON: {str(error)[:200]}") from None
    names = {layout.name: layout.name for layout in layouts}
    tied = {name: of for name, of in metadata.items() if of in names and name not in (*names, "format")}
    return {"map": {name: {"array": {"of": of, "kind": framework}} for name, of in (names | tied).items()}}


def _read_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise ConfigError(f"{path} is a file of PyTorch, which cannot be imported here") from None
    try:
        with open(path, "rb") as file:
            # By its descriptor, as PyTorch opens only names in UTF-8, and maps only the newer of its two formats.
            opened = f"/proc/self/fd/{file.fileno()}"
            return torch.load(opened, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        unsafe = _UNSAFE.search(str(error))
        if unsafe is None:
            raise DataError(_describe_no_torch(path, error)) from None
        raise ConfigError(
            f"{path} has a {unsafe[1]} in it, and to make one is to run what the file says. If you trust the file, "
            "load it with torch.load(..., weights_only=False) and save the tensors of it alone, its state_dict()"
        ) from None
    except (
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        OSError,
        AttributeError,
        IndexError,
        TypeError,
    ) as error:
        raise DataError(_describe_no_torch(path, error)) from None


def _describe_no_torch(path: Path, error: Exception) -> str:
    """Return what to say of a file that torch.load failed with: what it raises is often the bare key of a table."""
    try:
        with open(path, "rb") as file:
            begin = file.read(8)
    except OSError as unreadable:
        return f"{path}: {unreadable.strerror or unreadable}"
    if not begin:
        return f"{path} is empty: it was cut off, or never written"
    if not begin.startswith((_ZIP, _PICKLE)):
        return (
            f"{path} is damaged, or not written by torch.save, whose files begin as a zip file or a pickle does: it "
            f"begins with {begin!r}"
        )
    why = (
        _first_line(error)
        if isinstance(error, RuntimeError)
        else f"{type(error).__name__}: {_first_line(error)}"
    )
    return f"{path} is damaged, or not written by torch.save: it cannot be read to its end ({why})"


def _read_numpy(path: Path, framework: Framework) -> Any:
    try:
        if path.suffix.lower() == ".npy":
            arrays = {path.stem: np.lib.format.open_memmap(path, mode="c")}
        elif zipfile.is_zipfile(path):
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = dict(archive)
        else:
            raise DataError(f"{path} is damaged, or not written by NumPy: it is no zip file")
    except DataError:
        raise
    except (ValueError, EOFError, OSError, KeyError, MemoryError, zipfile.BadZipFile, SyntaxError) as error:
        if "allow_pickle" in str(error) or "Python objects" in str(error):
            raise ConfigError(
                f"{path} has Python objects in it, and to make them is to run what the file says: save numbers alone"
            ) from None
        raise DataError(f"{path} is damaged, or not written by NumPy: {_first_line(error)}") from None
    if framework == "numpy":
        return arrays
    return _as_state(readable(arrays), "torch")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


# Writing


def write_state(
    path: str | Path,
    state: Any,
    *,
    part: str | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write a state as other people read it; which kind of checkpoint follows from the name.

    path: of a file that ends with .safetensors or what torch.save's do; or of a folder, made if it is missing, for the
        layout of Hugging Face. Each file appears once it is whole and durable, the index of a folder last.
    state: nested values, or a `Readable`, of which a safetensors file takes one tensor at a time into memory.
    part: name of the mapping in it to write, such as "model"; None: all.
    shard_bytes: of tensors in a file of a folder, at most, but for a tensor that is larger; None: 5 GB.
    overwrite: whether a file that is there is written anew.

    Returns: the files written.
    Raises: ConfigError if the kind is not known, the file is there already, the folder has a model already, or a
        tensor's type does not exist there; DataError naming the file that cannot be written.
    """
    path = Path(path)
    source = state if isinstance(state, Readable) else readable(state)
    if part is not None:
        source = Readable(part_of(source.tree, part), source.read)
    suffix = path.suffix.lower()
    if suffix in (SAFETENSORS, *TORCH) and path.exists() and not overwrite:
        raise ConfigError(f"{path} is there already: name another file, or have it replaced (--overwrite)")
    if suffix in TORCH:
        _write_torch(path, source)
        return [path]
    if suffix == SAFETENSORS:
        entries, metadata = _entries(source)
        write_safetensors(path, entries, metadata)
        return [path]
    if suffix and not path.is_dir():
        known = ", ".join((SAFETENSORS, *TORCH))
        raise ConfigError(f"{path} ends with none of {known}: name such a file, or a folder")
    return _write_folder(path, source, 5_000_000_000 if shard_bytes is None else shard_bytes)


def _write_folder(folder: Path, source: Readable, shard_bytes: int) -> list[Path]:
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes is {shard_bytes}; a file takes at least 1, 5 GB are usual")
    if folder.is_dir() and (old := sorted(folder.glob("model*.safetensors*"))):
        raise ConfigError(f"{folder} has a model already, {old[0].name}: remove it, or name another folder")
    entries, metadata = _entries(source)
    shards = _shared_out(entries, shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror or error}") from error
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    )
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, metadata)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.layout.nbytes for entry in entries)},
            "weight_map": {
                entry.layout.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
            },
        }
        with whole_file(folder / INDEX) as file:
            file.write(json.dumps(index, indent=2).encode())
        names.append(INDEX)
    return [folder / name for name in names]


def _shared_out(entries: list[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.layout.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.layout.nbytes
    return shards


def _entries(source: Readable) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors to write, and the metadata that says what they are."""
    root = source.tree.root
    # What Hugging Face's readers ask for.
    metadata = {"format": "pt"}
    is_plain = isinstance(root, MappingNode) and all(
        isinstance(key, str)
        and isinstance(part, ArrayLeaf)
        and part.kind != "bytes"
        and not part.text_bytes
        and part.quantizer is None
        for key, part in zip(root.keys, root.parts, strict=True)
    )
    names: dict[str, str] = {}
    if is_plain:
        assert isinstance(root, MappingNode), "checked above"
        names = {part.name: key for key, part in zip(root.keys, root.parts, strict=True)}
    kept: dict[Any, str] = {}
    instead: dict[str, str] = {}
    entries = []
    for leaf in source.tree.leaves:
        if not isinstance(leaf, ArrayLeaf):
            continue
        name = names.get(leaf.name, leaf.name)
        owner = name if name in metadata else kept.setdefault((leaf.of, leaf.view), name)
        instead[leaf.name] = owner
        if owner == name:
            entries.append(Entry(Layout(name, leaf.view.dtype, leaf.view.shape), _reader(source, leaf)))
        elif is_plain:
            metadata[name] = owner

    def array(leaf: ArrayLeaf) -> dict[str, Any]:
        return describe_full(leaf, instead[leaf.name])

    if not is_plain:
        metadata[_TREE] = json.dumps(write_node(root, array), separators=(",", ":"))
    return entries, metadata


def _reader(source: Readable, leaf: ArrayLeaf) -> Callable[[], Bytes]:
    def read() -> Bytes:
        data = source.read(leaf.of)
        if leaf.is_all:
            return data
        return np.frombuffer(leaf.view.over(data).tobytes(), np.uint8)

    return read


def _write_torch(path: Path, source: Readable) -> None:
    try:
        import torch
    except ImportError:
        raise ConfigError(f"{path} would be a file of PyTorch, which cannot be imported here") from None
    for leaf in source.tree.leaves:
        if isinstance(leaf, ArrayLeaf) and leaf.text_bytes:
            raise ConfigError(
                f"{leaf.name} is a NumPy array of byte strings, of which torch.load reads no code: write a "
                f"{SAFETENSORS} file, or leave it out"
            )
    state = _without_scalars(_as_state(source, "torch"))
    with whole_file(path) as file:
        torch.save(state, file)


def _as_state(source: Readable, framework: Framework) -> Any:
    wanted = {leaf.of for leaf in source.tree.leaves if isinstance(leaf, ArrayLeaf)}
    memory = {}
    for name in wanted:
        data = source.read(name)
        # It is not written to; but PyTorch warns of memory that it could not write to.
        memory[name] = memory_at(data.__array_interface__["data"][0], data.nbytes, data, writable=True)
    return plan_loading(source.tree, framework=framework, memory=memory).state()


def _without_scalars(value: Any) -> Any:
    """Return a state with Python's numbers for NumPy's, which `weights_only` does not read."""
    if isinstance(value, dict):
        return {_without_scalars(key): _without_scalars(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_scalars, value))
    return value.item() if isinstance(value, np.generic) else value
