"""How far a block of Penstock's own codec is from what its model could be coded in."""

from __future__ import annotations

import numpy as np

from penstock.checkpoint.codecs import _words_kernels as loops
from penstock.checkpoint.codecs import kernel_sizes as sizes
from penstock.checkpoint.codecs.codec import Kind, Pair
from penstock.checkpoint.codecs.ours import FORMS
from penstock.checkpoint.state.tensors import Bytes


def model_bits(pair: Pair, kind: Kind, payload: Bytes) -> float:
    """Return what a perfect entropy coder that knew their counts would make of an encoded block's symbols, in bits.

    pair: what was encoded, as kind and payload, a PLANE or a DIFFERENCE. The model is the payload's own: its contexts,
        its symbols, and the bits beside them, which nobody can compress. Tables are not counted. Slow.
    """
    form = FORMS[pair.dtype]
    size = pair.values.size // form.item
    new, old, words = (np.zeros(size, form.word) for _ in range(3))
    keys, exponents = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
    loops.load(np.array(pair.values), 0, form.item, new)
    shift, contexts = int(payload[1]), int(payload[2])
    symbols, runs, lead = (int(short) for short in payload[4:10].copy().view("<u2"))
    if kind == Kind.PLANE and form.exponent_bits:
        rest_bits = 8 * new.itemsize - 8 * form.item + form.mantissa_bits - 1 - shift
        loops.to_planes(new, shift, rest_bits, lead, words, keys)
    else:
        if kind == Kind.DIFFERENCE and pair.reference is not None:
            loops.load(np.array(pair.reference), 0, form.item, old)
        is_float, is_byte = form.exponent_bits > 0, form.item == 1
        places = (form.exponent_at, form.exponent_mask)
        loops.to_differences(
            new, old, shift, is_float, is_byte, *places, sizes.FINEST, words, keys, exponents
        )
    at = sizes.HEADER_BYTES
    boundaries = payload[at : at + 2 * (contexts - 1)].copy().view("<u2")
    at += 2 * (contexts - 1)
    groups = int(payload[3]) + 1
    starts = payload[at : at + 2 * (groups - 1)].copy().view("<u2")
    at += 2 * (groups - 1)
    rests = np.repeat(payload[at : at + 2 * runs : 2], payload[at + 1 : at + 2 * runs : 2]).astype(np.uint64)
    begins = np.cumsum(
        np.concatenate([[lead << int(rests[0]) if runs else 0], np.uint64(1) << rests]).astype("u8")
    )
    symbol = np.searchsorted(begins, words, side="right") - 1
    symbol[(symbol < 0) | (symbol >= symbols)] = symbols
    bits = float(np.append(rests, 8 * new.itemsize - shift)[symbol].sum())
    context = (exponents[:, None] < boundaries).sum(1) * groups
    # What a lane had before: four places before, and after the last whole four the place before.
    places_before, whole = np.arange(size) - 4, size - size % 4
    places_before[whole + 1 :] += 3
    # An escape's group is its word's, which the first word of each group says.
    group = (words[:, None] >= begins[np.minimum(starts, symbols)]).sum(1)
    context += np.where(places_before >= 0, group[places_before], 0)
    symbol += np.where(symbol == symbols, group, 0)
    counts = np.bincount(
        context * (symbols + groups) + symbol, minlength=contexts * groups * (symbols + groups)
    )
    by_context = counts.reshape(contexts * groups, symbols + groups)
    of_context = np.broadcast_to(by_context.sum(1, keepdims=True), by_context.shape)
    seen = by_context > 0
    return bits + float((by_context[seen] * np.log2(of_context[seen] / by_context[seen])).sum())
