"""Documents of unequal length packed into rows of so many tokens, planned from their lengths."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan.orders import FullShuffle, check_seed
from penstock.units import format_count, is_integer

Ids = NDArray[np.int64]

#: What becomes of a document that is longer than a row.
TooLong = Literal["split", "truncate", "error"]

_MOST_TOKENS = 1 << 24
_MOST_PIECES = 1 << 31
#: Documents that are packed together: few enough for a processor's cache, and the last rows of a pool are few.
_POOL = 1 << 20


class Row(NamedTuple):
    """What a row is packed of, document behind document: its tokens [begins, begins + lengths), int64[pieces] each."""

    documents: Ids
    begins: Ids
    lengths: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Rows of at most so many tokens, each of documents that fill it well.

    Documents are shuffled, and packed in pools of a million by best-fit decreasing: the longest first, each is put into
    the fullest row that has space for it. All of it follows from lengths and seed. A document of no tokens is in no
    row.

    lengths: int[documents], in tokens; an array or memory map.
    tokens: of a row.
    too_long: of a document longer than a row: "split" cuts it into rows' lengths and a rest, "truncate" leaves out what
        is behind a row's length, "error" raises.
    Time: 0.2 us a document. Memory: 5 bytes a document besides its length, as much again while it is planned; 8 more
        where documents are split.
    Source: Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, section 3.
    Raises: ConfigError for lengths that are no integers, and a document that is too long, with its number.

    >>> packing = Packing([5, 3, 8, 2, 2], tokens=8, too_long="error")
    >>> [sorted(packing.row(row).documents.tolist()) for row in range(len(packing))]
    [[2], [0, 1], [3, 4]]
    """

    lengths: ArrayLike = field(repr=False)
    tokens: int
    _: KW_ONLY
    too_long: TooLong
    seed: int = 0
    #: Row r has the pieces _pieces[_bounds[r]:_bounds[r + 1]].
    _bounds: Ids = field(init=False, repr=False)
    _pieces: NDArray[np.int32] = field(init=False, repr=False)
    #: The first piece of each document, and the number of all; None where each document is one piece.
    _firsts: Ids | None = field(init=False, repr=False)
    _packed_tokens: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not is_integer(self.tokens) or not 1 <= self.tokens <= _MOST_TOKENS:
            raise ConfigError(f"tokens is {self.tokens!r}; a row has 1 to {_MOST_TOKENS:,}")
        if self.too_long not in get_args(TooLong):
            raise ConfigError(
                f'too_long is {self.too_long!r}; a document longer than a row is "split", "truncate"d, or an "error"'
            )
        lengths = self.lengths if isinstance(self.lengths, np.ndarray) else np.asarray(self.lengths)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not lengths.size:
            raise ConfigError(
                f"lengths is {lengths.dtype} of shape {lengths.shape}; it holds an integer for each document"
            )
        if lengths.dtype.kind == "i" and lengths.min() < 0:
            document = int(np.argmax(lengths < 0))
            raise ConfigError(
                f"lengths has {lengths[document]} for document {document:,}; a length is 0 or more"
            )
        object.__setattr__(self, "lengths", lengths)
        firsts, sizes = self._cut(lengths)
        if not sizes.size:
            raise ConfigError("lengths are all 0: give documents that have tokens")
        self._pack(firsts, sizes)

    def _cut(self, lengths: NDArray[Any]) -> tuple[Ids | None, NDArray[np.int32]]:
        """Return where the pieces of each document begin, see `_firsts`, and how long each piece is."""
        longest = int(lengths.max())
        if longest > self.tokens and self.too_long == "error":
            document = int(np.argmax(lengths > self.tokens))
            raise ConfigError(
                f"document {document:,} has {int(lengths[document]):,} tokens, and a row {self.tokens:,}: give longer "
                'rows, or too_long="split" or "truncate"'
            )
        if longest <= self.tokens or self.too_long == "truncate":
            sizes = np.minimum(lengths, self.tokens).astype(np.int32)
            if sizes.all():
                return None, sizes
            counts = (sizes > 0).astype(np.int64)
            return np.concatenate(([0], np.cumsum(counts))), sizes[sizes > 0]
        counts = -(-lengths.astype(np.int64) // self.tokens)
        firsts = np.concatenate(([0], np.cumsum(counts)))
        if firsts[-1] >= _MOST_PIECES:
            raise ConfigError(
                f"documents make {int(firsts[-1]):,} pieces, 2**31 at least: pack them in parts"
            )
        sizes = np.full(int(firsts[-1]), self.tokens, np.int32)
        has_some = counts > 0
        rest = lengths.astype(np.int64) - (counts - 1) * self.tokens
        sizes[firsts[1:][has_some] - 1] = rest[has_some]
        return firsts, sizes

    def _pack(self, firsts: Ids | None, sizes: NDArray[np.int32]) -> None:
        from penstock.plan import _packing_kernels as kernels  # loads numba

        order = FullShuffle(sizes.size, self.seed)
        pieces, bounds = np.empty(sizes.size, np.int32), [np.zeros(1, np.int64)]
        for begin in range(0, sizes.size, _POOL):
            ids = order.at(0, np.arange(begin, min(begin + _POOL, sizes.size)))
            rows, members = np.empty(ids.size, np.int32), np.empty(ids.size, np.int32)
            ends = np.empty(kernels.best_fit(sizes[ids], self.tokens, rows) + 1, np.int64)
            kernels.group(rows, ends, members)
            pieces[begin : begin + ids.size] = ids[members]
            bounds.append(begin + ends[1:])
        object.__setattr__(self, "_firsts", firsts)
        object.__setattr__(self, "_packed_tokens", int(sizes.sum(dtype=np.int64)))
        object.__setattr__(self, "_bounds", np.concatenate(bounds))
        object.__setattr__(self, "_pieces", pieces)

    def __len__(self) -> int:
        return self._bounds.size - 1

    @property
    def documents(self) -> int:
        """How many lengths there are."""
        return int(np.asarray(self.lengths).size)

    @property
    def padding_share(self) -> float:
        """The share of all rows' tokens that is padding."""
        return 1 - self._packed_tokens / (len(self) * self.tokens)

    def row(self, row: int) -> Row:
        """Return what a row is packed of. Raises: IndexError if there is none."""
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}; there are {len(self):,}")
        pieces = self._pieces[self._bounds[row] : self._bounds[row + 1]].astype(np.int64)
        documents, begins = pieces, np.zeros(pieces.size, np.int64)
        if self._firsts is not None:
            documents = np.searchsorted(self._firsts, pieces, side="right") - 1
            begins = (pieces - self._firsts[documents]) * self.tokens
        left = np.asarray(self.lengths)[documents].astype(np.int64) - begins
        return Row(documents, begins, np.minimum(left, self.tokens))

    def digest(self) -> str:
        """Return a digest of what fixes the rows."""
        lengths = np.ascontiguousarray(self.lengths)
        found = xxhash.xxh3_128(f"{lengths.dtype.str} {self.tokens} {self.too_long} {self.seed}".encode())
        found.update(lengths.view(np.uint8).data)
        return found.hexdigest()

    def __str__(self) -> str:
        rows, documents = format_count(len(self), "row"), format_count(self.documents, "document")
        return f"{documents} in {rows} of {self.tokens:,} tokens, {100 * self.padding_share:.2g} % of them padding"
