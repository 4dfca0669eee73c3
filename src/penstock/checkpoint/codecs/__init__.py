"""How the bytes of a tensor are stored: each codec turns a block of values into fewer bytes, and back bit for bit."""

from __future__ import annotations

from functools import cache

from penstock.checkpoint.codecs.codec import Codec, Decoder, Kind
from penstock.checkpoint.state.dtypes import DType
from penstock.checkpoint.state.tensors import Bytes
from penstock.errors import ConfigError, FormatError

#: What a store uses where nobody chose.
DEFAULT = "balance"


@cache
def _codecs() -> dict[str, Codec]:
    from penstock.checkpoint.codecs import ours, paper

    return {codec.name: codec for codec in (*ours.CODECS, *paper.CODECS)}


@cache
def _decoders() -> dict[Kind, Decoder]:
    from penstock.checkpoint.codecs import ours, paper

    return {**ours.DECODERS, **paper.DECODERS, Kind.STORED: _decode_stored, Kind.EQUAL: _decode_equal}


def codec_named(name: str) -> Codec:
    """Return a codec. Raises: ConfigError listing the known names."""
    try:
        return _codecs()[name]
    except (KeyError, TypeError):
        known = ", ".join(_codecs())
        raise ConfigError(f"codec is {name!r}; the known ones are {known}") from None


def decode_block(kind: int, payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    """Decode a block that was stored as `kind`, see `penstock.checkpoint.codecs.codec.Decoder`.

    Raises: FormatError if payload is no such block, or the kind is unknown or needs a reference that is not there.
    """
    try:
        decoder = _decoders()[Kind(kind)]
    except (KeyError, ValueError):
        raise FormatError(f"a block is of kind {kind}, which this Penstock does not know") from None
    decoder(payload, dtype, reference, out)


def _decode_stored(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    if payload.size != out.size:
        raise FormatError(f"a stored block has {payload.size} bytes instead of {out.size}")
    out[:] = payload


def _decode_equal(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    if payload.size or reference is None:
        raise FormatError("a block is said to equal a reference that it does not have")
    out[:] = reference
