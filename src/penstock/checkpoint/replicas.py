"""Whether what every rank is to have alike is alike: of a state that is, one rank's is kept, whichever it is.

What is likely to be a rank's own and is given as everybody's would come back wrong on all ranks but one: the state of a
random generator, a place in the data, a count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import xxhash

from penstock.checkpoint.dtypes import DTYPES
from penstock.checkpoint.state import Flat, Source
from penstock.checkpoint.tensors import Layout
from penstock.checkpoint.tree import JSON, ArrayLeaf, read_tree
from penstock.errors import ConfigError

#: Larger arrays are not compared: the states of random generators are smaller, and reading takes time.
_MOST_BYTES = 64 << 10
_MOST_NAMED = 3


#: Of a value: a digest of all of it, and of all but its floats.
Said = Sequence[str]


def digest_of(flat: Flat) -> str:
    """Return one digest of a state's plain values and its small arrays, wherever the keys of mappings stand."""
    digest = xxhash.xxh3_128(_text(flat.tree))
    for source in _small(flat):
        digest.update(source.tensor().data.data)
    return digest.hexdigest()


def digests_of(flat: Flat) -> dict[str, Said]:
    """Return digests of each plain value and small array, by name."""
    arrays = {source.layout.name: source for source in _small(flat)}
    said: dict[str, Said] = {}
    for leaf in read_tree(flat.tree, map(_whole, flat.layouts)).leaves:
        if isinstance(leaf, ArrayLeaf):
            # How it lies in the bytes, too: these and the tree may be of different ranks.
            coarse = full = str(leaf).encode()
            source = arrays.get(leaf.of)
            if source is not None:
                full += source.tensor().data.tobytes()
                coarse = coarse if _has_floats(source.layout.dtype.name) else full
        else:
            full, coarse = _text(leaf.value), _text(_without_floats(leaf.value))
        said[leaf.name] = [xxhash.xxh3_64_hexdigest(full), xxhash.xxh3_64_hexdigest(coarse)]
    return said


def told_apart(of_ranks: Sequence[dict[str, Said]]) -> str:
    """Return what to say of floats that differ between ranks, or "": they may, as the means of a batch norm do.

    of_ranks: what `digests_of` returned on each.
    Raises: ConfigError naming what else differs.
    """
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        wrong = [name for name in first if name not in other or other[name][1] != first[name][1]]
        if wrong:
            raise ConfigError(
                f"{_named(wrong)} between rank 0 and rank {rank}, and the state is to be equal on all ranks: give what "
                "a rank has for itself as per_rank="
            )
    floats = [name for name in first if any(other[name] != first[name] for other in of_ranks)]
    return f"{_named(floats)} between ranks: kept as one of them has it" if floats else ""


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    told = ", ".join(name or "the state" for name in names[:_MOST_NAMED])
    return f"{told}{f' and {more:,} more' if more > 0 else ''} {'differs' if len(names) == 1 else 'differ'}"


def _small(flat: Flat) -> Iterator[Source]:
    for source in flat.sources:
        # A copy from a device would have to be waited for.
        if source.layout.box is None and source.layout.nbytes <= _MOST_BYTES and source.is_on_host:
            yield source


def _text(tree: JSON) -> bytes:
    return json.dumps(tree, sort_keys=True).encode()


def _has_floats(dtype: str) -> bool:
    return DTYPES[dtype].is_float or dtype.startswith("complex")


def _without_floats(node: JSON) -> JSON:
    """Return a plain value's part of the tree with all floats alike."""
    if isinstance(node, list):
        return [_without_floats(part) for part in node]
    if isinstance(node, dict):
        ((tag, body),) = node.items()
        if tag in ("float", "complex") or (tag == "scalar" and _has_floats(body[0])):
            return 0.0
        if tag == "map":
            return {tag: {key: _without_floats(part) for key, part in body.items()}}
        return {tag: _without_floats(body)}
    return 0.0 if isinstance(node, float) else node


def _whole(layout: Layout) -> Layout:
    return layout if layout.box is None else Layout(layout.name, layout.dtype, layout.box.whole)
