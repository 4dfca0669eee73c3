"""Packed documents for language models: a data set whose samples are rows of so many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.asked import NAMES, asked_by
from penstock.loader.dataset import MapDataset
from penstock.loader.source_samples import below, describe_sample
from penstock.plan.packing import Packing, TooLong
from penstock.store.mixing import Mixed

#: Of padding in `labels`, which PyTorch's cross entropy leaves out.
IGNORED = -100


class PackedDocuments:
    """Documents of a data set, packed into rows of so many tokens: a data set of these rows.

    Rows are planned once, from lengths, by best fit (see `penstock.plan.Packing`), as TRL's `packing=True` packs them;
    a loader then shuffles rows. A row is a dict of int64[tokens]:

        input_ids      the tokens of its documents, one behind the other, then `pad`
        labels         the same, and -100 where there is padding
        position_ids   0, 1, 2, ... in each document, and in the padding
        document_ids   0 in its first document, 1 in its second, ...; -1 in padding

    Models of transformers that have `position_ids` keep documents apart by themselves; for attention over sequences
    of unequal length there is `cu_seqlens`.

    dataset: map-style; a document is integers, an array or a list, or a mapping that has them as `field`.
    lengths: int[documents], in tokens. too_long, seed: as of `Packing`.
    Raises: ConfigError as `Packing`, for lengths of another number of documents, and for a mixture.
    """

    def __init__(
        self,
        dataset: MapDataset,
        lengths: ArrayLike,
        *,
        tokens: int,
        too_long: TooLong,
        pad: int = 0,
        field: str = "input_ids",
        seed: int = 0,
    ) -> None:
        self.dataset, self.pad, self.field = dataset, pad, field
        self.packing = Packing(lengths, tokens, too_long=too_long, seed=seed)
        if self.packing.documents != len(dataset):
            raise ConfigError(
                f"lengths is of {self.packing.documents:,} documents, and {type(dataset).__name__} has "
                f"{len(dataset):,}: give one for each"
            )
        if isinstance(below(dataset), Mixed):
            raise ConfigError(
                "dataset is a mixture, and rows are packed without its weights: pack each source, and mix the rows"
            )
        if asks := asked_by(dataset.__getitem__).intersection(NAMES):
            raise ConfigError(
                f"{type(dataset).__name__}.__getitem__ asks for {', '.join(sorted(asks))}, and documents are packed "
                "once for all epochs: change tokens in collate_fn= or in the training"
            )

    def __len__(self) -> int:
        return len(self.packing)

    def __repr__(self) -> str:
        return f"PackedDocuments of {type(self.dataset).__name__}: {self.packing}"

    def __getitem__(self, row: int) -> dict[str, NDArray[np.int64]]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, NDArray[np.int64]]]:
        """Return several rows; their documents are asked for at once, where the data set can."""
        packed = [self.packing.row(row) for row in rows]
        wanted = np.concatenate([row.documents for row in packed]).tolist()
        get_list: Any = getattr(self.dataset, "__getitems__", None)
        documents = iter(map(self.dataset.__getitem__, wanted) if get_list is None else get_list(wanted))
        found = []
        for row in packed:
            parts = []
            for document, begin, length in zip(*(part.tolist() for part in row), strict=True):
                whole = self._tokens_of(next(documents), document)
                parts.append(whole[begin : begin + length])
            found.append(self._row(parts))
        return found

    def _tokens_of(self, value: Any, document: int) -> NDArray[Any]:
        if isinstance(value, Mapping):
            if self.field not in value:
                raise DataError(
                    f"{describe_sample(self.dataset, document)} has no {self.field!r}, but "
                    f"{', '.join(map(repr, value))}: give field=, its tokens"
                )
            value = value[self.field]
        found = np.asarray(value)
        length = int(np.asarray(self.packing.lengths)[document])
        if found.ndim != 1 or found.dtype.kind not in "iu" or found.size != length:
            raise DataError(
                f"{describe_sample(self.dataset, document)} is {found.dtype}{list(found.shape)}, and by its length "
                f"{length:,} tokens, which are integers: correct lengths, or the data set"
            )
        return found

    def _row(self, parts: list[NDArray[Any]]) -> dict[str, NDArray[np.int64]]:
        tokens = self.packing.tokens
        sizes = [part.size for part in parts]
        padding = tokens - sum(sizes)
        lengths = np.array([*sizes, padding])
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        ids = np.concatenate([*parts, np.full(padding, self.pad)]).astype(np.int64, copy=False)
        labels = ids.copy()
        labels[tokens - padding :] = IGNORED
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": np.arange(tokens) - begins,
            "document_ids": np.repeat([*range(len(sizes)), -1], lengths),
        }


def cu_seqlens(position_ids: ArrayLike) -> tuple[NDArray[np.int32], int]:
    """Return where the documents of a batch begin, and how long the longest is, as `flash_attn_varlen_func` takes them.

    position_ids: int[rows, tokens] of `PackedDocuments`, flattened as queries and keys are. Padding is a document too.
    Returns: int32[documents + 1], the last is the number of all tokens; and the most tokens of one.

    >>> cu_seqlens([[0, 1, 2, 0], [0, 1, 0, 1]])
    (array([0, 3, 4, 6, 8], dtype=int32), 3)
    """
    positions = np.asarray(position_ids).ravel()
    bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
    return bounds, int(np.diff(bounds).max(initial=0))
