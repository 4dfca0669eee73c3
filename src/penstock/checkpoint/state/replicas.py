"""Whether what every rank is to have alike is alike: of a state that is, one rank's is kept, whichever it is.

What is likely to be a rank's own and is given as everybody's would come back wrong on all ranks but one: the state of a
random generator, a place in the data, a count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import xxhash

from penstock.checkpoint.state.dtypes import DTYPES
from penstock.checkpoint.state.flatten import Flat, Source
from penstock.checkpoint.state.tree import JSON, ArrayLeaf, read_tree
from penstock.errors import ConfigError
from penstock.units import format_names

#: Larger arrays are not compared: the states of random generators are smaller, and reading takes time.
_MOST_BYTES = 64 << 10


#: Of a value, digests: of what is to be equal; of an array's numbers that are to be; of floats, which may differ. ""
#: stands for numbers that are not compared.
Said = Sequence[str]


def digest_of(flat: Flat) -> str:
    """Return one digest of a state's plain values and its small arrays, wherever the keys of mappings stand."""
    digest = xxhash.xxh3_128(_text(flat.tree))
    for source in _small(flat):
        digest.update(source.data().data)
    return digest.hexdigest()


def digests_of(flat: Flat) -> dict[str, Said]:
    """Return digests of each plain value and small array, by name."""
    arrays = {source.layout.name: source for source in _small(flat)}
    said: dict[str, Said] = {}
    for leaf in read_tree(flat.tree, (layout.whole for layout in flat.layouts)).leaves:
        if isinstance(leaf, ArrayLeaf):
            # How it lies in the bytes, too: these and the tree may be of different ranks.
            equal = xxhash.xxh3_64_hexdigest(str(leaf).encode())
            numbers = floats = ""
            source = arrays.get(leaf.of)
            if source is not None:
                numbers = xxhash.xxh3_64_hexdigest(source.data().data)
                if _has_floats(source.layout.dtype.name):
                    numbers, floats = "", numbers
            said[leaf.name] = [equal, numbers, floats]
        else:
            equal = xxhash.xxh3_64_hexdigest(_text(_without_floats(leaf.value)))
            said[leaf.name] = [equal, "", xxhash.xxh3_64_hexdigest(_text(leaf.value))]
    return said


def differing_floats(of_ranks: Sequence[dict[str, Said]]) -> list[str]:
    """Return the names of floats that differ between ranks: they may, as the means of a batch norm do.

    of_ranks: what `digests_of` returned on each.
    Raises: ConfigError naming what else differs, or is not on all ranks.
    """
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for one, names, another, lacking in ((rank, other, 0, first), (0, first, rank, other)):
            if missing := [name for name in names if name not in lacking]:
                raise ConfigError(
                    f"rank {one} has {missing[0] or 'a plain value'}, which rank {another} has not: a state has the "
                    "same names on all ranks; give what a rank has for itself as per_rank="
                )
    # Of an array that one rank has whole and others in parts, which may be empty, there is nothing to compare.
    whole = [name for name in first if all(other[name][1] for other in of_ranks)]
    for rank, other in enumerate(of_ranks):
        wrong = {name for name in first if other[name][0] != first[name][0]}
        wrong |= {name for name in whole if other[name][1] != first[name][1]}
        if wrong:
            raise ConfigError(
                f"{_named([name for name in first if name in wrong])} between rank 0 and rank {rank}, and the state is "
                "to be equal on all ranks: give what a rank has for itself as per_rank="
            )
    return [
        name
        for name in first
        if all(other[name][2] for other in of_ranks)
        and any(other[name][2] != first[name][2] for other in of_ranks)
    ]


def describe_differing(floats: Sequence[str]) -> str:
    """Return a line that names floats that differ between ranks; "" if there are none."""
    return f"{_named(floats)} between ranks: kept as rank 0 has it" if floats else ""


def _named(names: Sequence[str]) -> str:
    text = format_names(name or "the state" for name in names)
    return f"{text} {'differs' if len(names) == 1 else 'differ'}"


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
