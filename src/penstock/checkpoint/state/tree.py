"""A state's nesting and plain values as JSON: the tree of a snapshot's manifest, written here and read as hostile.

| in the state | in the tree |
|---|---|
| None, bool, int, finite float, str, list | as JSON has them |
| a mapping | `{"map": {key: node}}` where all keys are text, else `{"items": [[key, node], ...]}` |
| a tuple | `{"tuple": [node, ...]}` |
| an int beyond 64 bits | `{"int": "-0x..."}` |
| a float that is not finite | `{"float": "7ff8000000000000"}`, its bits |
| a complex number | `{"complex": [bits, bits]}` |
| text with lone surrogates | `{"text": hexadecimal of its UTF-8}` |
| bytes, few of them | `{"bytes": hexadecimal}` |
| a NumPy scalar | `{"scalar": [type, hexadecimal of its bytes, little-endian]}`; of a byte string the type is "bytes" |
| torch.Size, torch.dtype, torch.device | `{"size": [...]}`, `{"dtype": name}`, `{"device": name}` |
| an array | `{"array": {"of": tensor, "kind": "torch"}}`, and what of `ArrayLeaf` differs from the tensor itself |

Every value has a name: its keys and positions joined by "/", with "~" and "/" in text keys written "~0" and "~1". A key
that is no text is named as it is printed; where a text key of the same mapping has that name, "~int:" or the like goes
before it. A list or tuple without arrays is one value with one name.

A NumPy array of byte strings is one of uint8, with their length as `text_bytes` and as its last dimension. A quantised
tensor of torch is one of its integers, with a `quantized` object: `dtype`, `axis` (null for one scale), `scales` and
`zero_points`, the bits of their floats as hexadecimal (of zero points: only where they are floats, else a list).
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.fields import (
    LARGEST_INT,
    LEAST_INT,
    excerpt,
    expect,
    integer,
    integers,
    items,
    matched,
)
from penstock.checkpoint.state.tensors import Bytes, Layout
from penstock.errors import ConfigError, FormatError
from penstock.units import format_names

#: What `json.loads` returns.
JSON: TypeAlias = Any
Framework: TypeAlias = Literal["torch", "numpy"]

#: Deeper states are refused, so that reading a tree never runs out of stack.
MOST_DEPTH = 100
#: Of an array; NumPy's limit.
MOST_DIMENSIONS = 64
_KINDS = ("torch", "numpy", "bytes")
#: Type of the integers of a quantised tensor of torch, by its own type.
QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,5})?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,31}")
_HEXADECIMAL = re.compile(r"(?:[0-9a-f]{2})*")
_BITS = re.compile(r"[0-9a-f]{16}")
_INT = re.compile(r"-?0x[0-9a-f]+")


# The nodes of a tree that was read


@dataclass(frozen=True, slots=True)
class View:
    """How an array lies in the bytes of its tensor.

    shape: numbers per dimension. strides, offset: bytes; to the next number of each dimension, and to the first one.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all numbers, each counted as often as it is seen."""
        return math.prod(self.shape) * self.dtype.item_bytes

    def over(self, memory: Bytes) -> np.ndarray[Any, Any]:
        """Return the bits of the numbers where they lie in memory: void[shape]."""
        return np.ndarray(self.shape, f"V{self.dtype.item_bytes}", memory, self.offset, self.strides)


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Maps the integers of a quantised tensor of torch to its values: (integer - zero point) * scale.

    dtype: a name in `QUANTIZED`. axis: along which each channel has a scale and a zero point of its own; None: the
    tensor has one of each. zero_points: integers, or floats where the tensor is of `per_channel_affine_float_qparams`.
    """

    dtype: str
    axis: int | None
    scales: tuple[float, ...]
    zero_points: tuple[int, ...] | tuple[float, ...]

    @property
    def has_float_zeros(self) -> bool:
        """Return whether zero points are floats."""
        return any(isinstance(point, float) for point in self.zero_points)


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """An array of the state.

    of: name of the tensor with its bytes, which arrays that share memory share. kind: torch, numpy, or bytes (many).
    is_all: whether the view is the tensor, in C order. text_bytes: length of the byte strings that the array is of,
    the view's last dimension; 0: it is of numbers. quantizer: of a quantised tensor, the view is of its integers.
    """

    name: str
    of: str
    kind: str
    view: View
    is_all: bool
    is_parameter: bool = False
    requires_grad: bool = False
    is_big_endian: bool = False
    text_bytes: int = 0
    quantizer: Quantizer | None = None

    @property
    def type_name(self) -> str:
        """Return the name of the array's type in NumPy or torch."""
        if self.quantizer is not None:
            return self.quantizer.dtype
        return f"bytes{8 * self.text_bytes}" if self.text_bytes else self.view.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the array's shape."""
        return self.view.shape[:-1] if self.text_bytes else self.view.shape


@dataclass(frozen=True, slots=True)
class PlainLeaf:
    """A value without arrays: a number, text, a list of them, an empty mapping."""

    name: str
    value: JSON


@dataclass(frozen=True, slots=True)
class MappingNode:
    """A mapping with at least one key. keys: nodes, in the mapping's order."""

    name: str
    keys: tuple[JSON, ...]
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A list or tuple that has an array somewhere below it."""

    name: str
    is_tuple: bool
    parts: tuple[Node, ...]


Node: TypeAlias = ArrayLeaf | PlainLeaf | MappingNode | SequenceNode


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree that was read and can be relied on. leaves: in the state's order. layouts: of the tensors, by name."""

    root: Node
    leaves: tuple[ArrayLeaf | PlainLeaf, ...]
    layouts: Mapping[str, Layout]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of every value."""
        return tuple(leaf.name for leaf in self.leaves)


def select(names: Iterable[str], only: Iterable[str]) -> frozenset[str]:
    """Return the names that at least one pattern fits.

    only: names, or patterns in which ``*`` stands for any text (with "/" in it), ``?`` for a character and ``[ab]`` for
        either; what fits a mapping or list fits all that is in it.
    Raises: ConfigError for a pattern that fits nothing.

    >>> sorted(select(["model/a", "model/b", "step"], ["model", "st*"]))
    ['model/a', 'model/b', 'step']
    """
    if isinstance(only, str):
        raise ConfigError(f"only is {only!r}: give a list of names or patterns, [{only!r}]")
    known = tuple(names)
    chosen: set[str] = set()
    for pattern in only:
        if not isinstance(pattern, str):
            raise ConfigError(f"only has {pattern!r} in it; a name or a pattern is text")
        fitting = [name for name in known if fits(name, pattern)]
        if not fitting:
            raise ConfigError(
                f"only has {pattern!r} in it, and no name fits it; there are {format_names(known, 5)}"
            )
        chosen.update(fitting)
    return frozenset(chosen)


def fits(name: str, pattern: str) -> bool:
    """Return whether a name, or a mapping or list that it lies in, fits a pattern of `select`."""
    return name == pattern or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern)


def part_of(tree: Tree, name: str) -> Tree:
    """Return the tree of a mapping, list or tuple in a state, in which names begin below it.

    Raises: ConfigError if there is none of that name.
    """
    nodes: list[Node] = [tree.root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (MappingNode, SequenceNode)):
            if node.name == name and node is not tree.root:
                root = _renamed(node, len(name) + 1)
                return Tree(root, tuple(leaves_of(root)), tree.layouts)
            nodes += node.parts
    raise ConfigError(
        f"there is no mapping called {name!r} in the state; its values are {format_names(tree.names, 5)}"
    )


def _renamed(node: Node, prefix: int) -> Node:
    """Return a node whose names lack so many characters at their beginning."""
    if isinstance(node, (MappingNode, SequenceNode)):
        parts = tuple(_renamed(part, prefix) for part in node.parts)
        return replace(node, name=node.name[prefix:], parts=parts)
    return replace(node, name=node.name[prefix:])


def write_node(node: Node, array: Callable[[ArrayLeaf], JSON]) -> JSON:
    """Return a node as JSON again. array: returns what is written for an array."""
    if isinstance(node, PlainLeaf):
        return node.value
    if isinstance(node, ArrayLeaf):
        return {"array": array(node)}
    parts = [write_node(part, array) for part in node.parts]
    if isinstance(node, SequenceNode):
        return {"tuple": parts} if node.is_tuple else parts
    return write_mapping(node.keys, parts)


def write_mapping(keys: Collection[JSON], parts: Iterable[JSON]) -> JSON:
    """Return a mapping as JSON. keys, parts: its keys and values, as nodes."""
    pairs = zip(keys, parts, strict=True)
    return {"map": dict(pairs)} if {str}.issuperset(map(type, keys)) else {"items": list(map(list, pairs))}


def describe_full(leaf: ArrayLeaf, of: str) -> dict[str, JSON]:
    """Return the tree's entry of an array that is a full tensor, not a view of one. of: name of the tensor."""
    body: dict[str, JSON] = {"of": of, "kind": leaf.kind}
    flags = {"parameter": leaf.is_parameter, "grad": leaf.requires_grad, "big_endian": leaf.is_big_endian}
    body |= {flag: True for flag, is_set in flags.items() if is_set}
    if leaf.text_bytes:
        body["text_bytes"] = leaf.text_bytes
    if leaf.quantizer is not None:
        body["quantized"] = write_quantizer(leaf.quantizer)
    return body


def write_quantizer(quantizer: Quantizer) -> dict[str, JSON]:
    """Return the tree's entry of a quantizer."""
    points = quantizer.zero_points
    return {
        "dtype": quantizer.dtype,
        "axis": quantizer.axis,
        "scales": "".join(map(_bits, quantizer.scales)),
        "zero_points": "".join(map(_bits, points)) if quantizer.has_float_zeros else list(points),
    }


def write_view(view: View) -> JSON:
    """Return what the tree says of a view."""
    shape, strides = list(view.shape), list(view.strides)
    return {"dtype": view.dtype.name, "shape": shape, "strides": strides, "offset": view.offset}


# Names


def joined(name: str, part: str, *, is_top: bool) -> str:
    """Return the name of a part of what has a name."""
    return part if is_top else f"{name}/{part}"


def encode_keys(keys: Iterable[Any], name: str) -> tuple[list[JSON], list[str]]:
    """Return a mapping's keys as nodes, and their names. name: of the mapping.

    Raises: ConfigError naming the mapping if a snapshot does not hold such; ValueError if two keys have one name.
    """
    nodes = list(keys)
    if {str}.issuperset(map(type, nodes)):
        text = "".join(nodes)
        if text.isascii() and "~" not in text and "/" not in text:
            return nodes, nodes  # as almost all are
    nodes = [encode_key(key, name) for key in nodes]
    return nodes, key_names(nodes)


def key_names(nodes: Sequence[JSON]) -> list[str]:
    """Return the names of a mapping's keys, given as nodes. Raises: ValueError if two keys have one name."""
    texts = {_escaped(node) for node in nodes if isinstance(node, str)}
    names = [_escaped(node) if isinstance(node, str) else _named_key(node, texts) for node in nodes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two keys are called {twice}")
    return names


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key


def _named_key(node: JSON, texts: set[str]) -> str:
    if isinstance(node, dict):
        ((tag, value),) = node.items()
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        return f"~{tag}:{_escaped(text)}"
    text = str(node)
    return f"~{type(node).__name__.lower()}:{text}" if text in texts else text


# Plain values


def encode_plain(value: Any, name: str) -> JSON:
    """Return the node of a value that is neither a container nor an array.

    Raises: ConfigError naming the value if a snapshot does not hold such.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if _is_whole_text(value) else {"text": value.encode("utf-8", "surrogatepass").hex()}
    if kind is int:
        return value if LEAST_INT <= value <= LARGEST_INT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": _bits(value)}
    if kind is complex:
        return {"complex": [_bits(value.real), _bits(value.imag)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, np.bytes_):
        return {"scalar": ["bytes", bytes(value).hex()]}
    if isinstance(value, np.generic):
        dtype = DTYPES.get(value.dtype.name)
        if dtype is None:
            raise unsupported(name, f"a NumPy scalar of type {value.dtype}", "turn it into a number or text")
        little = np.asarray(value).astype(value.dtype.newbyteorder("<"))
        return {"scalar": [dtype.name, little.tobytes().hex()]}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if torch is not None and isinstance(value, torch.device):
        return {"device": str(value)}
    advice = "turn it into numbers, text or an array"
    raise unsupported(
        name, describe_type(value), "give its state_dict()" if hasattr(value, "state_dict") else advice
    )


def encode_key(key: Any, name: str, depth: int = 0) -> JSON:
    """Return the node of a mapping's key. Raises: ConfigError naming the mapping if a snapshot does not hold such."""
    if type(key) is str and key.isascii():
        return key
    if isinstance(key, tuple):
        if depth > MOST_DEPTH:
            raise ConfigError(f"{name or 'the state'} has a key nested deeper than {MOST_DEPTH} levels")
        tag = "size" if is_size(key) else "tuple"
        return {tag: [encode_key(part, name, depth + 1) for part in key]}
    return encode_plain(key, f"a key of {name or 'the state'}")


def is_size(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple is a torch.Size."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Size)


def unsupported(name: str, what: str, advice: str) -> ConfigError:
    """Return the error for a value that a snapshot does not hold."""
    return ConfigError(
        f"{name or 'the state'} is {what}, which a snapshot does not hold: leave it out, or {advice}"
    )


def describe_type(value: Any) -> str:
    """Return what a value is, for a message."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    own = getattr(value, "__qualname__", None)
    name = f"{module}{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}" + (
        f" ({own})" if isinstance(own, str) else ""
    )


def _is_whole_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bits(number: float) -> str:
    return struct.pack(">d", number).hex()


def decode_plain(node: JSON, torch: ModuleType | None, depth: int = 0) -> Any:
    """Return the value of a node without arrays.

    torch: None if torch.Size, dtype and device are to come back as a tuple and as text.
    Raises: FormatError if it is no such node.
    """
    if depth > MOST_DEPTH:
        raise FormatError(f"the tree is deeper than {MOST_DEPTH} levels")
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, str):
        if not _is_whole_text(node):
            raise FormatError(f"the tree has {excerpt(node)}, which is no Unicode")
        return node
    if isinstance(node, int):
        if not LEAST_INT <= node <= LARGEST_INT:
            raise FormatError("the tree has a bare number beyond 64 bits")
        return node
    if isinstance(node, float):
        if not math.isfinite(node):
            raise FormatError(f"the tree has the number {node}, which JSON has not")
        return node
    if isinstance(node, list):
        return [decode_plain(part, torch, depth + 1) for part in node]
    if not (isinstance(node, dict) and len(node) == 1):
        raise FormatError(f"the tree has {excerpt(node)}, which is no value")
    ((tag, body),) = node.items()
    if tag in ("tuple", "size"):
        parts = tuple(decode_plain(part, torch, depth + 1) for part in expect(list, body, tag))
        return parts if tag == "tuple" else _size(parts, torch)
    if tag == "map":
        entries = expect(dict, body, tag).items()
        return {decode_plain(key, torch): decode_plain(part, torch, depth + 1) for key, part in entries}
    if tag == "items":
        pairs = [items(2, part, "a key with its value") for part in expect(list, body, "items")]
        return keyed(
            [decode_key(key, torch) for key, _ in pairs],
            [decode_plain(part, torch, depth + 1) for _, part in pairs],
        )
    decode = _SCALARS.get(tag)
    if decode is None:
        raise FormatError(f"the tree has {excerpt(node)}, which is no value")
    return decode(body, torch)


def decode_key(node: JSON, torch: ModuleType | None) -> Any:
    """Return a mapping's key. Raises: FormatError if it is none."""
    key = decode_plain(node, torch)
    try:
        hash(key)
    except TypeError:
        raise FormatError(f"the tree has {excerpt(node)} as a key, which cannot be one") from None
    return key


def keyed(keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    """Return a mapping. Raises: FormatError if two keys are equal."""
    mapping = dict(zip(keys, values, strict=True))
    if len(mapping) < len(keys):
        raise FormatError("the tree has a mapping with two equal keys")
    return mapping


def _float(body: JSON, _torch: ModuleType | None) -> float:
    return float(struct.unpack(">d", bytes.fromhex(matched(_BITS, body, "a float of the tree")))[0])


def _complex(body: JSON, torch: ModuleType | None) -> complex:
    parts = items(2, body, "a complex number")
    return complex(_float(parts[0], torch), _float(parts[1], torch))


def _text(body: JSON, torch: ModuleType | None) -> str:
    try:
        return _bytes(body, torch).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise FormatError(f"the tree has text that is not UTF-8: {excerpt(body)}") from None


def _bytes(body: JSON, _torch: ModuleType | None) -> bytes:
    return bytes.fromhex(matched(_HEXADECIMAL, body, "bytes of the tree"))


def _scalar(body: JSON, torch: ModuleType | None) -> Any:
    parts = expect(list, body, "a scalar")
    if len(parts) == 2 and parts[0] == "bytes":
        return np.bytes_(_bytes(parts[1], torch))
    dtype = DTYPES.get(parts[0]) if len(parts) == 2 and isinstance(parts[0], str) else None
    if dtype is None:
        raise FormatError(f"the tree has a scalar {excerpt(body)} of no known type")
    data = _bytes(parts[1], torch)
    if len(data) != dtype.item_bytes:
        raise FormatError(f"the tree has a scalar of type {dtype.name} with {len(data)} bytes")
    return np.frombuffer(data, numpy_dtype(dtype).newbyteorder("<"))[0]


def _dtype(body: JSON, torch: ModuleType | None) -> Any:
    name = matched(_DTYPE, body, "a type of the tree")
    if torch is None:
        return name
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"the tree has the type {name}, which this PyTorch does not know")
    return dtype


def _device(body: JSON, torch: ModuleType | None) -> Any:
    name = matched(_DEVICE, body, "a device of the tree")
    if torch is None:
        return name
    try:
        return torch.device(name)
    except RuntimeError:
        raise FormatError(f"the tree has the device {name}, which this PyTorch does not know") from None


_SCALARS = {
    "int": lambda body, _: int(matched(_INT, body, "an int of the tree"), 16),
    "float": _float,
    "complex": _complex,
    "text": _text,
    "bytes": _bytes,
    "scalar": _scalar,
    "dtype": _dtype,
    "device": _device,
}


def _size(parts: tuple[Any, ...], torch: ModuleType | None) -> tuple[int, ...]:
    for part in parts:
        integer(part, "a size", LEAST_INT)
    return parts if torch is None else torch.Size(parts)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return NumPy's type of a type.

    A bfloat16 or 8-bit float is that of the package ml_dtypes where it is installed, else unsigned integers with the
    same bits.
    """
    if hasattr(np, dtype.name):
        return np.dtype(dtype.name)
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return np.dtype(f"uint{8 * dtype.item_bytes}")
    own = getattr(ml_dtypes, dtype.name, None)
    return np.dtype(f"uint{8 * dtype.item_bytes}" if own is None else own)


# Reading


def read_tree(tree: JSON, layouts: Iterable[Layout]) -> Tree:
    """Read a tree, trusting nothing in it.

    tree: what `json.loads` returned. layouts: of the tensors that it speaks of, checked against the files already.
    Raises: FormatError if it is no tree, or not of these tensors.
    """
    by_name: dict[str, Layout] = {}
    for layout in layouts:
        if by_name.setdefault(layout.name, layout) is not layout:
            raise FormatError(f"there are two tensors called {layout.name}")
    root = _Reader(by_name).node(tree, "", 0)
    leaves = tuple(leaves_of(root))
    names = [leaf.name for leaf in leaves]
    if len(set(names)) < len(names):
        raise FormatError("the tree has two values of one name")
    users: dict[str, int] = {}
    for leaf in leaves:
        if isinstance(leaf, ArrayLeaf):
            users[leaf.of] = users.get(leaf.of, 0) + 1
    for leaf in leaves:
        # Bytes are copied when they are read: shared ones could be made to fill any memory.
        if isinstance(leaf, ArrayLeaf) and leaf.kind == "bytes" and users[leaf.of] > 1:
            raise FormatError(f"{leaf.name}: its bytes are also those of another value")
    return Tree(root, leaves, by_name)


def leaves_of(node: Node) -> Iterator[ArrayLeaf | PlainLeaf]:
    """Yield a node's values, in the state's order."""
    if isinstance(node, (ArrayLeaf, PlainLeaf)):
        yield node
        return
    for part in node.parts:
        yield from leaves_of(part)


class _Reader:
    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self._layouts = layouts

    def node(self, node: JSON, name: str, depth: int) -> Node:
        if depth > MOST_DEPTH:
            raise FormatError(f"the tree is deeper than {MOST_DEPTH} levels")
        if isinstance(node, list):
            return self._sequence(node, node, name, depth, is_tuple=False)
        if isinstance(node, dict) and len(node) == 1:
            ((tag, body),) = node.items()
            if tag == "array":
                return self._array(expect(dict, body, name or tag), name)
            if tag == "map":
                entries = expect(dict, body, name or tag)
                return self._mapping(node, list(entries), list(entries.values()), name, depth)
            if tag == "items":
                pairs = [items(2, part, "a key with its value") for part in expect(list, body, "items")]
                return self._mapping(
                    node, [key for key, _ in pairs], [part for _, part in pairs], name, depth
                )
            if tag == "tuple":
                return self._sequence(node, expect(list, body, name or tag), name, depth, is_tuple=True)
        decode_plain(node, None)
        return PlainLeaf(name, node)

    def _mapping(self, node: JSON, keys: list[JSON], parts: list[JSON], name: str, depth: int) -> Node:
        if not keys:
            return PlainLeaf(name, node)
        keyed([decode_key(key, None) for key in keys], keys)
        try:
            names = key_names(keys)
        except ValueError as error:
            raise FormatError(f"the tree has a mapping {name} in which {error}") from None
        nodes = tuple(
            self.node(part, joined(name, own, is_top=depth == 0), depth + 1)
            for own, part in zip(names, parts, strict=True)
        )
        return MappingNode(name, tuple(keys), nodes)

    def _sequence(self, node: JSON, parts: list[JSON], name: str, depth: int, *, is_tuple: bool) -> Node:
        nodes = tuple(
            self.node(part, joined(name, str(index), is_top=depth == 0), depth + 1)
            for index, part in enumerate(parts)
        )
        if not any(map(_has_arrays, nodes)):
            return PlainLeaf(name, node)
        return SequenceNode(name, is_tuple, nodes)

    def _array(self, body: dict[str, JSON], name: str) -> ArrayLeaf:
        of, kind, view = body.get("of"), body.get("kind"), body.get("view")
        layout = self._layouts.get(of) if isinstance(of, str) else None
        if layout is None:
            raise FormatError(f"{name} is said to be in the tensor {excerpt(of)}, which there is not")
        if kind not in _KINDS:
            raise FormatError(
                f"{name} is said to be an array of kind {excerpt(kind)}; there are {', '.join(_KINDS)}"
            )
        flags = {}
        for flag in ("parameter", "grad", "big_endian"):
            flags[flag] = body.get(flag, False)
            if not isinstance(flags[flag], bool):
                raise FormatError(f"{name}: {flag} is {excerpt(flags[flag])}, neither true nor false")
        unknown = body.keys() - {"of", "kind", "view", "text_bytes", "quantized", *flags}
        if unknown:
            raise FormatError(f"{name} has {excerpt(sorted(unknown)[0])}, which no array has")
        seen = whole(layout) if view is None else self._view(expect(dict, view, name), layout, name)
        text_bytes = integer(body.get("text_bytes", 0), f"{name}: text_bytes")
        said = body.get("quantized")
        leaf = ArrayLeaf(
            name,
            layout.name,
            kind,
            seen,
            view is None,
            flags["parameter"],
            flags["grad"],
            flags["big_endian"],
            text_bytes,
            None if said is None else _quantizer(expect(dict, said, name), seen, name),
        )
        _check_kind(leaf)
        return leaf

    def _view(self, body: dict[str, JSON], layout: Layout, name: str) -> View:
        if body.keys() != {"dtype", "shape", "strides", "offset"}:
            raise FormatError(f"{name} is a view with {', '.join(sorted(map(str, body)))}")
        dtype = DTYPES.get(body["dtype"]) if isinstance(body["dtype"], str) else None
        if dtype is None:
            raise FormatError(f"{name} is a view of no known type: {excerpt(body['dtype'])}")
        shape, strides = (integers(body[part], f"{name}: {part}") for part in ("shape", "strides"))
        offset = integer(body["offset"], f"{name}: offset", LEAST_INT)
        if len(shape) != len(strides) or len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0:
            raise FormatError(f"{name} is a view of shape {excerpt(shape)} with strides {excerpt(strides)}")
        if math.prod(max(length, 1) for length in shape) * dtype.item_bytes > LARGEST_INT:
            raise FormatError(f"{name} is a view of shape {excerpt(shape)}, which is beyond any memory")
        view = View(dtype, shape, strides, offset)
        begin, end = extent(view)
        if begin < 0 or end > layout.nbytes:
            raise FormatError(
                f"{name} is a view of bytes {begin:,} to {end:,} of {layout.name}, which has {layout.nbytes:,}"
            )
        return view


def whole(layout: Layout) -> View:
    """Return the view that is all of a tensor, in C order."""
    return View(layout.dtype, layout.shape, c_strides(layout.shape, layout.dtype.item_bytes), 0)


def c_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of numbers in C order."""
    strides, step = [], item_bytes
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def extent(view: View) -> tuple[int, int]:
    """Return where a view's first byte is and where its last one ends; the same place if it has none."""
    if 0 in view.shape:
        return view.offset, view.offset
    ways = [(length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)]
    begin = view.offset + sum(way for way in ways if way < 0)
    return begin, view.offset + sum(way for way in ways if way > 0) + view.dtype.item_bytes


def _check_kind(leaf: ArrayLeaf) -> None:
    is_torch, is_bytes = leaf.kind == "torch", leaf.kind == "bytes"
    if (leaf.is_parameter or leaf.requires_grad) and not is_torch:
        raise FormatError(f"{leaf.name} is said to have a gradient and to be of kind {leaf.kind}")
    if leaf.requires_grad and not (leaf.view.dtype.is_float or leaf.view.dtype.name.startswith("complex")):
        raise FormatError(f"{leaf.name} is said to have a gradient and to be of type {leaf.view.dtype.name}")
    if leaf.is_big_endian and (leaf.kind != "numpy" or not leaf.is_all):
        raise FormatError(f"{leaf.name} is said to be big-endian and to be of kind {leaf.kind} or a view")
    if is_bytes and not (leaf.is_all and leaf.view.dtype.name == "uint8" and len(leaf.view.shape) == 1):
        raise FormatError(f"{leaf.name} is said to be bytes and is not")
    if leaf.text_bytes and not (
        leaf.kind == "numpy"
        and leaf.view.dtype.name == "uint8"
        and leaf.view.shape[-1:] == (leaf.text_bytes,)
        and leaf.view.strides[-1] == 1
        and not leaf.is_big_endian
    ):
        raise FormatError(f"{leaf.name} is said to be byte strings and is not")
    if leaf.quantizer is not None and (not is_torch or leaf.requires_grad):
        raise FormatError(
            f"{leaf.name} is said to be quantised, and of kind {leaf.kind} or to have a gradient"
        )
    if is_torch and min(leaf.view.strides, default=0) < 0:
        raise FormatError(f"{leaf.name} is said to be of kind torch and to run backwards")


def _quantizer(body: dict[str, JSON], view: View, name: str) -> Quantizer:
    if body.keys() != {"dtype", "axis", "scales", "zero_points"}:
        raise FormatError(f"{name} is quantised with {', '.join(sorted(map(str, body)))}")
    dtype, axis, points = body["dtype"], body["axis"], body["zero_points"]
    if not isinstance(dtype, str) or QUANTIZED.get(dtype) != view.dtype.name:
        raise FormatError(f"{name} is of {view.dtype.name} and is said to be of {excerpt(dtype)}")
    scales = _floats(body["scales"])
    zeros = _floats(points) if isinstance(points, str) else integers(points, f"{name}: zero_points")
    if axis is None:
        channels, is_whole = 1, not isinstance(points, str)
    else:
        is_whole = type(axis) is int and 0 <= axis < len(view.shape)
        channels = view.shape[axis] if is_whole else 0
    if not is_whole or len(scales) != channels or len(zeros) != channels:
        raise FormatError(
            f"{name} is quantised along {excerpt(axis)} by {len(scales)} scales, {len(zeros)} zeros"
        )
    return Quantizer(dtype, axis, scales, zeros)


def _floats(node: JSON) -> tuple[float, ...]:
    data = _bytes(node, None)
    if len(data) % 8:
        raise FormatError(f"the tree has floats of {len(data)} bytes")
    return struct.unpack(f">{len(data) // 8}d", data)


def _has_arrays(node: Node) -> bool:
    if isinstance(node, MappingNode):
        return any(map(_has_arrays, node.parts))
    return not isinstance(node, PlainLeaf)
