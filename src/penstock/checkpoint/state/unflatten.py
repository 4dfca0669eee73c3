"""A state put together: from a tree and tensors' bytes, either anew or into a state that is there.

A `Loading` says which tensors have to be read and where to, each a `Destination`: memory of the target itself where
the bytes can go there as they are, else a buffer for one tensor at a time. Whoever reads fills each destination's
memory and finishes it, and asks for the state at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from penstock.checkpoint.state.flatten import (
    Shard,
    characters_of,
    holds_arrays,
    integers_of,
    is_array,
    memory_at,
    quantizer_of,
    torch_bits,
)
from penstock.checkpoint.state.tensors import Bytes, Layout
from penstock.checkpoint.state.tree import (
    JSON,
    ArrayLeaf,
    Framework,
    MappingNode,
    Node,
    PlainLeaf,
    Quantizer,
    SequenceNode,
    Tree,
    View,
    decode_key,
    decode_plain,
    describe_type,
    encode_keys,
    extent,
    fits,
    joined,
    keyed,
    leaves_of,
    numpy_dtype,
    select,
    whole,
)
from penstock.errors import ConfigError, FormatError

#: Arrays that cannot be views of their tensors are copied; more than so many times all bytes and these is an attack.
_MOST_COPIES = 4
_FREE_COPIES_BYTES = 1 << 20
_MOST_MISMATCHES = 5
_EMPTY_MAPPINGS: tuple[JSON, ...] = ({"map": {}}, {"items": []})


class Destination:
    """Where the bytes of a tensor go. Filled and finished by one thread; different ones by different threads."""

    def __init__(self, layout: Layout, *, direct: Bytes | None = None, for_torch: bool = False) -> None:
        self.layout = layout
        #: Whether `memory` was there before.
        self.is_direct = direct is not None
        #: Whether values of the state will be views of the memory, so that it stays.
        self.is_kept = True
        self._memory = direct
        self._for_torch = for_torch
        self._owner: Any = None
        self._copies: list[tuple[ArrayLeaf, Any]] = []

    @property
    def memory(self) -> Bytes:
        """Return the bytes to fill, uint8[layout.nbytes]; made when it is first asked for."""
        if self._memory is None:
            if self._for_torch:
                # PyTorch aligns its memory as its kernels like it.
                import torch

                self._owner = torch.empty(self.layout.nbytes, dtype=torch.uint8)
                self._memory = self._owner.numpy()
            else:
                self._memory = np.empty(self.layout.nbytes, np.uint8)
        return self._memory

    @property
    def storage(self) -> Any:
        if self._owner is None:
            import torch

            self._owner = torch.from_numpy(self.memory)
        return self._owner.untyped_storage()

    def copy_later(self, leaf: ArrayLeaf, target: Any) -> None:
        """Have `finish` copy an array to one that is there."""
        self._copies.append((leaf, target))

    def fetch(self) -> None:
        """Fill the memory with what the state that is loaded into has now, for what is a difference to that."""
        for leaf, target in self._copies:
            if isinstance(target, np.ndarray):
                _copy_numpy(target, _numpy_view(self.memory, leaf.view))
            else:
                torch_bits(_torch_view(self, leaf.view)).copy_(torch_bits(target.detach()))

    def finish(self) -> None:
        """Take the memory as filled: copy from it what belongs elsewhere; free it if nothing else needs it."""
        for leaf, target in self._copies:
            if isinstance(target, np.ndarray):
                _copy_numpy(_numpy_view(self.memory, leaf.view), target)
            else:
                with _torch_module().inference_mode(target.is_inference()):
                    torch_bits(target).copy_(torch_bits(_torch_view(self, leaf.view)))
        self._copies = []
        if not (self.is_direct or self.is_kept):
            self._memory = self._owner = None


@dataclass(frozen=True, slots=True)
class Loading:
    """What has to be read for a state, and then the state.

    destinations: one for each tensor to read. state: returns the state; all destinations are finished.
    not_loaded: names of values of the snapshot that what was loaded into does not have. not_found: names of values of
        what was loaded into that the snapshot does not have; they are as they were. replaced: names of plain values of
        what was loaded into that are others now; complete once the state is there.
    fits_nothing: whether there is something to load, and nothing of it has a place in what is loaded into.
    """

    destinations: tuple[Destination, ...]
    state: Callable[[], Any]
    not_loaded: tuple[str, ...] = ()
    not_found: tuple[str, ...] = ()
    replaced: Sequence[str] = ()
    fits_nothing: bool = False


def plan_loading(
    tree: Tree,
    *,
    only: Iterable[str] | None = None,
    framework: Framework | None = None,
    memory: Mapping[str, Bytes] | None = None,
) -> Loading:
    """Return what to read for a new state.

    only: names or patterns (`tree.select`) of what to load; a mapping of which nothing is loaded is
        not there, in a list or tuple None stands in such a place.
    framework: "numpy" or "torch", to have all arrays as such. In NumPy a bfloat16 or 8-bit float is that of the package
        ml_dtypes where it is installed, else unsigned integers with the same bits.
    memory: by name the bytes of tensors that are in memory already, writable; the arrays are views of them.
    Raises: ConfigError for a pattern that fits nothing, an unknown framework, or one that cannot be imported.
    """
    if framework not in (None, "numpy", "torch"):
        raise ConfigError(f"framework is {framework!r}; it is 'numpy', 'torch', or None for what was saved")
    chosen = None if only is None else select(tree.names, only)
    leaves = [leaf for leaf in tree.leaves if chosen is None or leaf.name in chosen]
    arrays = [leaf for leaf in leaves if isinstance(leaf, ArrayLeaf)]
    builder = _Builder(tree, framework)
    for_torch = {leaf.of for leaf in arrays if builder.is_torch(leaf)}
    for leaf in arrays:
        if leaf.of not in builder.destinations:
            direct = None if memory is None else memory.get(leaf.of)
            destination = Destination(tree.layouts[leaf.of], direct=direct, for_torch=leaf.of in for_torch)
            builder.destinations[leaf.of] = destination

    def build() -> Any:
        state = builder.build(tree.root, chosen)
        return {} if state is _NOTHING else state

    return Loading(tuple(builder.destinations.values()), build)


# A new state

_NOTHING = object()


class _Builder:
    """Makes values from a tree's nodes."""

    def __init__(self, tree: Tree, framework: Framework | None) -> None:
        self.destinations: dict[str, Destination] = {}
        self._framework = framework
        self._copies_left_bytes = _FREE_COPIES_BYTES + _MOST_COPIES * sum(
            layout.nbytes for layout in tree.layouts.values()
        )
        self._plain_torch: ModuleType | None = None
        if framework != "numpy" and _names_torch(tree):
            self._plain_torch = _torch_module()

    def is_torch(self, leaf: ArrayLeaf) -> bool:
        if leaf.kind == "bytes" or leaf.text_bytes:
            return False
        return (self._framework or leaf.kind) == "torch"

    def key(self, node: JSON) -> Any:
        return decode_key(node, self._plain_torch)

    def plain(self, leaf: PlainLeaf) -> Any:
        return decode_plain(leaf.value, self._plain_torch)

    def build(self, node: Node, chosen: frozenset[str] | None) -> Any:
        if isinstance(node, PlainLeaf):
            return self.plain(node) if chosen is None or node.name in chosen else _NOTHING
        if isinstance(node, ArrayLeaf):
            return self.array(node) if chosen is None or node.name in chosen else _NOTHING
        parts = [self.build(part, chosen) for part in node.parts]
        if all(part is _NOTHING for part in parts):
            return _NOTHING
        if isinstance(node, MappingNode):
            pairs = zip(node.keys, parts, strict=True)
            there = [(self.key(key), part) for key, part in pairs if part is not _NOTHING]
            return keyed([key for key, _ in there], [part for _, part in there])
        values = [None if part is _NOTHING else part for part in parts]
        return tuple(values) if node.is_tuple else values

    def array(self, leaf: ArrayLeaf) -> Any:
        destination = self.destinations[leaf.of]
        if leaf.kind == "bytes":
            return destination.memory.tobytes()
        if self.is_torch(leaf):
            return self._torch(leaf, destination)
        array = _numpy_view(destination.memory, leaf.view)
        if leaf.text_bytes:
            return np.ndarray(
                leaf.shape,
                f"S{leaf.text_bytes}",
                destination.memory,
                leaf.view.offset,
                leaf.view.strides[:-1],
            )
        if not leaf.is_big_endian:
            return array
        self._count_copy(leaf)
        return array.byteswap().view(array.dtype.newbyteorder(">"))

    def _count_copy(self, leaf: ArrayLeaf) -> None:
        self._copies_left_bytes -= leaf.view.nbytes
        if self._copies_left_bytes < 0:
            raise FormatError(f"{leaf.name} is one of too many arrays that would have to be copied")

    def _torch(self, leaf: ArrayLeaf, destination: Destination) -> Any:
        torch = _torch_module()
        view = leaf.view
        item_bytes = view.dtype.item_bytes
        fits = not view.offset % item_bytes and not any(way % item_bytes or way < 0 for way in view.strides)
        if fits:
            tensor = _torch_view(destination, view)
        else:
            # PyTorch has no backward strides, nor any between two numbers.
            self._count_copy(leaf)
            copy = Destination(Layout(leaf.name, view.dtype, view.shape), for_torch=True)
            whole(copy.layout).over(copy.memory)[...] = view.over(destination.memory)
            tensor = _torch_view(copy, whole(copy.layout))
        if leaf.quantizer is not None:
            tensor = _quantized(tensor, leaf.quantizer)
        if leaf.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=leaf.requires_grad)
        return tensor.requires_grad_() if leaf.requires_grad else tensor


def _names_torch(tree: Tree) -> bool:
    """Return whether a key or plain value of a tree is PyTorch's."""

    def within(node: JSON) -> bool:
        if isinstance(node, list):
            return any(map(within, node))
        if not isinstance(node, dict):
            return False
        ((tag, body),) = node.items()
        if tag == "map":
            return any(map(within, body.values()))
        return tag in ("size", "dtype", "device") or (tag in ("items", "tuple") and within(body))

    def below(node: Node) -> bool:
        if isinstance(node, PlainLeaf):
            return within(node.value)
        if isinstance(node, ArrayLeaf):
            return False
        return (isinstance(node, MappingNode) and any(map(within, node.keys))) or any(map(below, node.parts))

    return below(tree.root)


def _torch_module() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            f"the state has tensors of PyTorch, which cannot be imported ({error}): install it, or ask for "
            'framework="numpy"'
        ) from None
    return torch


def _numpy_view(memory: Bytes, view: View) -> np.ndarray[Any, Any]:
    return np.ndarray(view.shape, numpy_dtype(view.dtype), memory, view.offset, view.strides)


def _torch_view(destination: Destination, view: View) -> Any:
    import torch

    dtype = getattr(torch, view.dtype.name, None)
    if dtype is None:
        raise ConfigError(
            f"this PyTorch has no type {view.dtype.name}: update it, or ask for framework='numpy'"
        )
    item_bytes = view.dtype.item_bytes
    strides = tuple(stride // item_bytes for stride in view.strides)
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(destination.storage, view.offset // item_bytes, view.shape, strides)


def _quantized(integers: Any, quantizer: Quantizer) -> Any:
    """Return a quantised tensor over the memory of its integers."""
    import torch

    dtype = getattr(torch, quantizer.dtype)
    if quantizer.axis is None:
        (scale,), (point,) = quantizer.scales, quantizer.zero_points
        tensor = torch._empty_affine_quantized((0,), scale=scale, zero_point=int(point), dtype=dtype)
    else:
        numbers = (torch.float32,) * 2 if quantizer.has_float_zeros else (torch.float64, torch.int64)
        tensor = torch._empty_per_channel_affine_quantized(
            integers.shape,
            scales=torch.tensor(quantizer.scales, dtype=numbers[0]),
            zero_points=torch.tensor(quantizer.zero_points, dtype=numbers[1]),
            axis=quantizer.axis,
            dtype=dtype,
        )
    # As torch.load makes them, but over memory that is there.
    return tensor.set_(
        integers.untyped_storage(), integers.storage_offset(), integers.shape, integers.stride()
    )


# Into a state that is there


def plan_loading_into(
    into: Any, tree: Tree, *, only: Iterable[str] | None = None, in_parts: bool = False
) -> Loading:
    """Return what to read for a state that is there already, which is checked and not changed yet.

    into: its arrays are overwritten in place, wherever they are; numbers, text and None are replaced, lists without
        arrays as a whole; where it has None, anything is put. A tuple that has to change is replaced by another of its
        class, in the mapping or list that holds it.
    only: as for `plan_loading`; nothing else is wanted then.
    in_parts: whether a destination may be a part of a tensor, its layout with a box, where `into` has but a `Shard`.
    Raises: ConfigError naming every array whose type or shape is another one, and what cannot be written to.
    """
    chosen = None if only is None else select(tree.names, only)
    patterns = None if only is None else tuple(only)
    matching = _Matching(tree, chosen, patterns, in_parts=in_parts)
    matching.match(tree.root, into, "", is_top=True)
    if matching.mismatches:
        listed = matching.mismatches[:_MOST_MISMATCHES]
        more = len(matching.mismatches) - len(listed)
        raise ConfigError("; ".join(listed) + (f"; and {more:,} more like these" if more else ""))
    return Loading(
        tuple(matching.destinations().values()),
        lambda: matching.put(tree.root, into),
        tuple(matching.not_loaded),
        tuple(matching.not_found),
        matching.replaced,
        matching.fits_nothing,
    )


class _Matching:
    """Holds a tree against a state, and puts the one into the other."""

    def __init__(
        self, tree: Tree, chosen: frozenset[str] | None, patterns: tuple[str, ...] | None, *, in_parts: bool
    ) -> None:
        self.mismatches: list[str] = []
        self.not_loaded: list[str] = []
        self.not_found: list[str] = []
        self.replaced: list[str] = []
        self._tree = tree
        self._chosen = chosen
        self._patterns = patterns
        self._in_parts = in_parts
        self._builder = _Builder(tree, None)
        self._targets: dict[str, list[tuple[ArrayLeaf, Any]]] = {}
        self._fresh: set[str] = set()
        #: Nodes that are put as they are, instead of a value without arrays, by id: the tree keeps them alive.
        self._placed: set[int] = set()

    def match(self, node: Node, value: Any, name: str, *, is_top: bool = False) -> None:
        if isinstance(node, MappingNode) and isinstance(value, Mapping):
            self._match_mapping(node, value, name, is_top=is_top)
        elif isinstance(node, SequenceNode) and isinstance(value, (list, tuple)):
            self._match_sequence(node, value, name, is_top=is_top)
        elif isinstance(node, ArrayLeaf) and (is_array(value) or isinstance(value, Shard)):
            if self._is_chosen(node):
                if _has_other_quantizer(node, value):
                    # Its scales cannot be changed: another takes its place.
                    self._place(node)
                else:
                    self._match_array(node, value)
        elif isinstance(node, PlainLeaf) and node.value in _EMPTY_MAPPINGS and isinstance(value, Mapping):
            if value:
                self._miss(value, name, is_top=is_top)
        elif _can_become(value, node) and not is_top:
            self._place(node)
        else:
            self._differs(node, value)

    def _match_mapping(self, node: MappingNode, value: Mapping[Any, Any], name: str, *, is_top: bool) -> None:
        keys = [self._builder.key(key) for key in node.keys]
        for key, part in zip(keys, node.parts, strict=True):
            if key in value:
                self.match(part, value[key], part.name)
            else:
                self._leave(part)
        known = set(keys)
        extra = {key: part for key, part in value.items() if key not in known}
        if extra:
            self._miss(extra, name, is_top=is_top)

    def _match_sequence(self, node: SequenceNode, value: Any, name: str, *, is_top: bool) -> None:
        for part, own in zip(node.parts, value, strict=False):
            self.match(part, own, part.name)
        for part in node.parts[len(value) :]:
            self._leave(part)
        for index, own in enumerate(value[len(node.parts) :], len(node.parts)):
            self._miss(own, joined(name, str(index), is_top=is_top))

    def _match_array(self, leaf: ArrayLeaf, target: Any) -> None:
        mismatch = _mismatch(leaf, target)
        if leaf.text_bytes and not mismatch:
            target = characters_of(target)
        elif leaf.quantizer is not None and not mismatch:
            target = integers_of(target)
        if mismatch:
            self.mismatches.append(f"{leaf.name or 'the state'} {mismatch}")
        elif not (isinstance(target, Shard) and 0 in target.array.shape):
            self._targets.setdefault(leaf.of, []).append((leaf, target))

    def _place(self, node: Node) -> None:
        self._placed.add(id(node))
        for leaf in leaves_of(node):
            if isinstance(leaf, ArrayLeaf) and self._is_chosen(leaf):
                self._fresh.add(leaf.of)

    def _leave(self, node: Node) -> None:
        self.not_loaded += [leaf.name for leaf in leaves_of(node) if self._is_chosen(leaf)]

    def _miss(self, value: Any, name: str, *, is_top: bool = False) -> None:
        for missing in _names_within(value, name, is_top=is_top):
            if self._patterns is None or any(fits(missing, pattern) for pattern in self._patterns):
                self.not_found.append(missing)

    def _differs(self, node: Node, value: Any) -> None:
        if not any(map(self._is_chosen, leaves_of(node))):
            return
        kinds = {ArrayLeaf: "an array", PlainLeaf: "a plain value", MappingNode: "a mapping"}
        saved = kinds.get(type(node), "a list or tuple")
        advice = ": give its state_dict()" if hasattr(value, "state_dict") else ""
        self.mismatches.append(
            f"{node.name or 'the state'} is {saved} in the snapshot and {describe_type(value)} in `into`{advice}"
        )

    @property
    def fits_nothing(self) -> bool:
        """Return whether everything was left out that there is to load."""
        return bool(self.not_loaded) and len(self.not_loaded) == sum(map(self._is_chosen, self._tree.leaves))

    def _is_chosen(self, leaf: ArrayLeaf | PlainLeaf) -> bool:
        return self._chosen is None or leaf.name in self._chosen

    def destinations(self) -> dict[str, Destination]:
        wanted = [*self._targets, *(of for of in self._fresh if of not in self._targets)]
        for of in wanted:
            layout, targets = _placed(
                self._tree.layouts[of],
                self._targets.get(of, []),
                in_parts=self._in_parts and of not in self._fresh,
            )
            direct = next(
                (memory for memory in (_direct(layout, *each) for each in targets) if memory is not None),
                None,
            )
            for_torch = not all(isinstance(target, np.ndarray) for _, target in targets) or of in self._fresh
            destination = Destination(layout, direct=direct, for_torch=for_torch and "torch" in sys.modules)
            destination.is_kept = of in self._fresh
            for leaf, target in targets:
                if direct is None or not _lies_at(leaf, target, direct):
                    destination.copy_later(leaf, target)
            self._builder.destinations[of] = destination
        return self._builder.destinations

    def put(self, node: Node, value: Any) -> Any:
        """Put the plain values, and return what belongs where `value` was: mostly itself."""
        if id(node) in self._placed:
            new = self._builder.build(node, self._chosen)
            if new is _NOTHING:
                return value
            leaves = [leaf for leaf in leaves_of(node) if self._is_chosen(leaf)]
            is_plain = all(isinstance(leaf, PlainLeaf) for leaf in leaves)
            if not is_plain or type(new) is not type(value) or new != value:
                self.replaced += [leaf.name for leaf in leaves]
            if isinstance(value, MutableSequence) and isinstance(new, list):
                value[:] = new
                return value
            return new
        if isinstance(node, MappingNode) and isinstance(value, Mapping):
            self._put_mapping(node, value)
            return value
        if isinstance(node, SequenceNode) and isinstance(value, (list, tuple)):
            return self._put_sequence(node, value)
        return value

    def _put_mapping(self, node: MappingNode, value: Mapping[Any, Any]) -> None:
        for key_node, part in zip(node.keys, node.parts, strict=True):
            key = self._builder.key(key_node)
            if key not in value:
                continue
            old = value[key]
            new = self.put(part, old)
            if new is not old:
                if not isinstance(value, MutableMapping):
                    raise ConfigError(
                        f"{node.name or 'the state'} is a mapping that cannot be changed: give a dict"
                    )
                value[key] = new

    def _put_sequence(self, node: SequenceNode, value: Any) -> Any:
        new = [self.put(part, own) for part, own in zip(node.parts, value, strict=False)]
        new += value[len(new) :]
        if all(one is other for one, other in zip(new, value, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = new
            return value
        make = getattr(type(value), "_make", type(value))
        return make(new)


def _placed(
    layout: Layout, targets: Sequence[tuple[ArrayLeaf, Any]], *, in_parts: bool
) -> tuple[Layout, list[tuple[ArrayLeaf, Any]]]:
    """Return what of a tensor has to be read, and the targets as plain arrays, each with how it lies in that.

    in_parts: whether it may be a part, which is wanted alone.
    """
    places = {target.place if isinstance(target, Shard) else None for _, target in targets}
    if in_parts and len(places) == 1 and None not in places and all(leaf.is_all for leaf, _ in targets):
        layout = Layout(layout.name, layout.dtype, *targets[0][1].place)
        return layout, [(replace(leaf, view=whole(layout)), shard.array) for leaf, shard in targets]
    return layout, [
        (_part(leaf, target), target.array) if isinstance(target, Shard) else (leaf, target)
        for leaf, target in targets
    ]


def _part(leaf: ArrayLeaf, shard: Shard) -> ArrayLeaf:
    """Return a part of an array as one of its own."""
    view = leaf.view
    offset = view.offset + sum(begin * way for begin, way in zip(shard.offsets, view.strides, strict=True))
    return replace(leaf, view=replace(view, shape=tuple(shard.array.shape), offset=offset), is_all=False)


def _mismatch(leaf: ArrayLeaf, target: Any) -> str:
    if leaf.kind == "bytes":
        return f"is bytes in the snapshot and {describe_type(target)} in `into`"
    if isinstance(target, Shard):
        if leaf.text_bytes or leaf.quantizer is not None:
            return "is of byte strings or quantised in the snapshot and a Shard in `into`"
        if target.whole != leaf.view.shape:
            return (
                f"is of shape {leaf.view.shape} in the snapshot and a part of shape {target.whole} in `into`"
            )
        return _mismatch(_part(leaf, target), target.array)
    dtype, view = _dtype_name(target), leaf.view
    # As the bits that it is in NumPy, where the package with its type is missing.
    is_bits = dtype == f"uint{8 * view.dtype.item_bytes}" and view.dtype.name.startswith(("bfloat", "float8"))
    if (dtype != leaf.type_name and not is_bits) or tuple(target.shape) != leaf.shape:
        return (
            f"is {leaf.type_name} of shape {leaf.shape} in the snapshot and {dtype} of shape {tuple(target.shape)} in "
            "`into`"
        )
    if isinstance(target, np.ndarray):
        if not target.flags.writeable:
            return "is read-only in `into`"
    elif (
        target.is_meta
        or target.layout is not _torch_module().strided
        or target.is_conj()
        or target.is_neg()
        or (target.numel() and not target.data_ptr())
    ):
        return "has no memory of its own in `into`: make it a plain tensor"
    steps = zip(target.shape, _strides(target), strict=True)
    if 0 not in target.shape and any(length > 1 and stride == 0 for length, stride in steps):
        return "has numbers that share memory (it was expanded) in `into`: make it contiguous"
    return ""


def _has_other_quantizer(leaf: ArrayLeaf, target: Any) -> bool:
    """Return whether a target is quantised as an array is, but by other scales or zero points."""
    return (
        leaf.quantizer is not None
        and getattr(target, "is_quantized", False)
        and (_dtype_name(target), tuple(target.shape)) == (leaf.type_name, leaf.shape)
        and quantizer_of(target) != leaf.quantizer
    )


def _dtype_name(target: Any) -> str:
    return target.dtype.name if isinstance(target, np.ndarray) else str(target.dtype).removeprefix("torch.")


def _strides(target: Any) -> tuple[int, ...]:
    if isinstance(target, np.ndarray):
        return target.strides
    return tuple(target.element_size() * stride for stride in target.stride())


def _direct(layout: Layout, leaf: ArrayLeaf, target: Any) -> Bytes | None:
    """Return the memory of a target if a tensor's bytes can be written there as they are."""
    if isinstance(target, np.ndarray):
        if not target.dtype.isnative:
            return None
    elif not target.is_cpu:
        return None
    view = leaf.view
    begin, end = extent(view)
    if (end - begin, view.offset, view.nbytes) != (layout.nbytes, 0, layout.nbytes) or not _lies_like(
        view, target
    ):
        return None
    return memory_at(_address(target), layout.nbytes, target, writable=True)


def _lies_at(leaf: ArrayLeaf, target: Any, memory: Bytes) -> bool:
    """Return whether a target already is the array of memory that was filled."""
    is_native = target.dtype.isnative if isinstance(target, np.ndarray) else target.is_cpu
    address = memory.__array_interface__["data"][0]
    return is_native and _address(target) == address + leaf.view.offset and _lies_like(leaf.view, target)


def _lies_like(view: View, target: Any) -> bool:
    pairs = zip(view.shape, view.strides, _strides(target), strict=True)
    return all(one == other for length, one, other in pairs if length > 1)


def _address(target: Any) -> int:
    if isinstance(target, np.ndarray):
        address: int = target.__array_interface__["data"][0]
        return address
    return int(target.data_ptr())


def _copy_numpy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    if (
        source.dtype != target.dtype
        and source.dtype.itemsize == target.dtype.itemsize
        and target.dtype.isnative
    ):
        target = target.view(source.dtype)
    np.copyto(target, source)


def _can_become(value: Any, node: Node) -> bool:
    """Return whether a value without arrays is one that a node's value may replace."""
    if isinstance(value, (list, tuple)):
        return isinstance(node, PlainLeaf) and not holds_arrays(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, (torch.dtype, torch.device))


def _names_within(value: Any, name: str, *, is_top: bool = False) -> Iterator[str]:
    """Yield the names that a state's values would have in a snapshot."""
    if isinstance(value, Mapping) and value:
        keys = list(value)
        try:
            _, names = encode_keys(keys, name)
        except ValueError:
            names = [str(key) for key in keys]
        for own, key in zip(names, keys, strict=True):
            yield from _names_within(value[key], joined(name, own, is_top=is_top))
    elif isinstance(value, (list, tuple)) and holds_arrays(value):
        for index, part in enumerate(value):
            yield from _names_within(part, joined(name, str(index), is_top=is_top))
    else:
        yield name
