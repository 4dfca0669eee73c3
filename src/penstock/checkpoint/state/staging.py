"""The staging area: a copy of the state, made while the training is blocked and written after it has resumed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import memmove
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.checkpoint.state.flatten import Source
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout, Piece
from penstock.flow.garbage import no_collection
from penstock.flow.ordered import Workers, in_groups

#: Tensors begin at multiples of that many bytes, so that any type of number can be read in place.
_ALIGN_BYTES = 64
#: Copied at a time by one thread.
_SLICE_BYTES = 8 << 20
#: Where bytes are copied to, where from, and how many.
_Move: TypeAlias = tuple[int, int, int]


class StagingArea:
    """Memory that is allocated once and reused: a copy into pages that were never touched takes twice as long.

    Pinned where a CUDA device is there, so that its copies run at the speed of the link.
    """

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)
        self.nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Make the area at least that large, its pages touched; what was in it is lost if it grows."""
        if self.nbytes < nbytes:
            self._bytes, self.nbytes = np.empty(0, np.uint8), 0
            self._bytes, self.nbytes = _touched(nbytes), nbytes

    @no_collection
    def copy(self, cuts: Sequence[Cut], workers: Workers | None = None) -> list[Piece]:
        """Copy what is cut out of a state into the area, `space_of` it reserved, and return it there.

        workers: who copies from main memory, several threads at once: one does not use all of the memory's bandwidth.
            None: the caller alone.
        """
        pieces, devices = [], set()
        moves: list[_Move] = []
        offset, address = 0, self._bytes.ctypes.data
        for source, first, place in cuts:
            begin = place.start
            nbytes = place.stop - begin
            copied = self._bytes[offset : offset + nbytes]
            if not source.is_on_host:
                devices.add(source.array.device)
            if source.address is None or not source.is_on_host:
                source.copy_into(copied, begin, non_blocking=True)
            elif nbytes <= _SLICE_BYTES:
                moves.append((address + offset, source.address + begin, nbytes))
            else:
                for at in range(0, nbytes, _SLICE_BYTES):
                    size = min(_SLICE_BYTES, nbytes - at)
                    moves.append((address + offset + at, source.address + begin + at, size))
            pieces.append(Piece(source.layout, first, copied))
            offset += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if workers is None or len(moves) <= 1:
            _move_all(moves)
        else:
            # What lies there stays, also where a second interrupt ends the wait for threads that copy.
            owners = self._bytes, cuts
            groups = in_groups(moves, itemgetter(2), _SLICE_BYTES, len(moves))
            for _ in workers.map(lambda group: _move_all(group, owners), groups):
                pass
        for device in devices:
            # Each has a stream of its own, whatever its kind.
            getattr(sys.modules["torch"], device.type).synchronize(device)
        return pieces


def _move_all(moves: Sequence[_Move], owners: object = None) -> None:
    """Copy. owners: of the memory, which stays for as long."""
    # By addresses, for arrays of NumPy take ten times as long to make as a small tensor to copy.
    for move in moves:
        memmove(*move)


class Cut(NamedTuple):
    """Some of a tensor's blocks in a row, where they are in the state. place: of their bytes in the tensor's."""

    source: Source
    first: int
    place: slice


def space_of(cuts: Sequence[Cut]) -> int:
    """Return the bytes that cuts take in an area."""
    nbytes = 0
    for _, _, place in cuts:
        nbytes += -(-(place.stop - place.start) // _ALIGN_BYTES) * _ALIGN_BYTES
    return nbytes


def waves_of(sources: Sequence[Source], limit_bytes: int | None) -> list[list[Cut]]:
    """Return a state's tensors, cut between blocks, in waves that take no more space than the limit each.

    limit_bytes: None: all in one wave. A wave of a single block may be larger.
    """
    if limit_bytes is None:
        ends = map(attrgetter("layout.nbytes"), sources)
        return [list(map(Cut, sources, repeat(0), map(slice, repeat(0), ends)))]
    waves = []
    for places in cut_waves([source.layout for source in sources], limit_bytes):
        cuts = []
        for index, place in places:
            block_bytes = BLOCK_VALUES * sources[index].layout.dtype.item_bytes
            cuts.append(Cut(sources[index], place.start // block_bytes, place))
        waves.append(cuts)
    return waves


def cut_waves(layouts: Sequence[Layout], limit_bytes: int | None) -> list[list[tuple[int, slice]]]:
    """Return where tensors are cut, as `waves_of` does: of each wave, which tensors, and which of their bytes."""
    waves: list[list[tuple[int, slice]]] = [[]]
    space = 0
    for index, layout in enumerate(layouts):
        nbytes = layout.nbytes
        block_bytes = BLOCK_VALUES * layout.dtype.item_bytes
        begin = 0
        while True:
            left = nbytes - begin
            if limit_bytes is not None and space + _aligned(left) > limit_bytes:
                space_left = max(0, limit_bytes - space) // _ALIGN_BYTES * _ALIGN_BYTES
                left = min(left, space_left // block_bytes * block_bytes)
            if not left and not waves[-1] and nbytes:
                left = min(block_bytes, nbytes - begin)
            if left or not nbytes:
                waves[-1].append((index, slice(begin, begin + left)))
                space += _aligned(left)
                begin += left
            if begin == nbytes:
                break
            waves.append([])
            space = 0
    return waves


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _touched(nbytes: int) -> Bytes:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        pinned: Bytes = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    area = np.empty(nbytes, np.uint8)
    area.fill(0)
    return area
