"""The compiled loop of `penstock.plan.packing`. Loads numba.

Measured: `benchmarks/budget.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def best_fit(lengths: NDArray[np.int32], tokens: int, rows: NDArray[np.int32]) -> int:
    """Put each piece, the longest first, into the fullest row that has space for it; return the number of rows.

    lengths: int32[n], 1 to `tokens`. rows: int32[n], written: which row each piece is in.
    Of rows with as much space the one that was filled last is taken. Complexity: O(n log tokens).
    """
    count = lengths.size
    begins = np.zeros(tokens + 2, np.int64)
    for piece in range(count):
        begins[tokens - lengths[piece] + 1] += 1
    for place in range(1, tokens + 2):
        begins[place] += begins[place - 1]
    by_length = np.empty(count, np.int32)
    for piece in range(count):
        place = tokens - lengths[piece]
        by_length[begins[place]] = piece
        begins[place] += 1

    leaves = 1
    while leaves < tokens + 1:
        leaves *= 2
    # Of each node, whether a row below it is open; leaf `leaves + s` is of rows with s tokens of space.
    is_open = np.zeros(2 * leaves, np.bool_)
    last = np.full(tokens + 1, -1, np.int32)  # the row with so much space that was filled last
    before = np.empty(count, np.int32)  # the row that was, before a row
    made = 0
    for index in range(count):
        piece = by_length[index]
        length = lengths[piece]
        node = leaves + length
        while not is_open[node]:
            while node & 1 and node > 1:  # nothing to the right below this parent
                node >>= 1
            if node <= 1:
                break
            node += 1
        if node <= 1:
            row, space = made, tokens
            made += 1
        else:
            while node < leaves:
                node *= 2
                if not is_open[node]:
                    node += 1
            space = node - leaves
            row = last[space]
            last[space] = before[row]
            if last[space] < 0:
                is_open[node] = False
                node >>= 1
                while node >= 1 and not (is_open[2 * node] or is_open[2 * node + 1]):
                    is_open[node] = False
                    node >>= 1
        rows[piece] = row
        space -= length
        if space > 0:
            before[row] = last[space]
            last[space] = row
            node = leaves + space
            while node >= 1 and not is_open[node]:
                is_open[node] = True
                node >>= 1
    return made


@kernel
def group(rows: NDArray[np.int32], bounds: NDArray[np.int64], members: NDArray[np.int32]) -> None:
    """List the pieces of each row, in their order.

    rows: int32[n], of each piece. bounds: int64[rows + 1], written: row r has members[bounds[r]:bounds[r + 1]].
    members: int32[n], written. Complexity: O(n).
    """
    bounds[:] = 0
    for piece in range(rows.size):
        bounds[rows[piece] + 1] += 1
    for row in range(1, bounds.size):
        bounds[row] += bounds[row - 1]
    place = bounds[:-1].copy()
    for piece in range(rows.size):
        members[place[rows[piece]]] = piece
        place[rows[piece]] += 1
