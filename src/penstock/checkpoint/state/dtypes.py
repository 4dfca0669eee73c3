"""The types of numbers that a snapshot can hold, by name, and how their bits are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DType:
    """A type of number.

    item_bytes: of one number. exponent_bits, mantissa_bits: of a binary float, below its sign bit; 0 and 0 where
        it is none (integers, booleans, pairs of floats, and float8_e8m0fnu, which is an exponent alone).
    """

    name: str
    item_bytes: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_float(self) -> bool:
        """Return whether a number is one sign bit, an exponent and a mantissa."""
        return self.exponent_bits > 0


#: By name: those of PyTorch, which NumPy's are too where it has the type.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float64", 8, 11, 52),
        DType("float32", 4, 8, 23),
        DType("float16", 2, 5, 10),
        DType("bfloat16", 2, 8, 7),
        DType("float8_e4m3fn", 1, 4, 3),
        DType("float8_e5m2", 1, 5, 2),
        DType("float8_e4m3fnuz", 1, 4, 3),
        DType("float8_e5m2fnuz", 1, 5, 2),
        DType("float8_e8m0fnu", 1),
        DType("complex64", 8),
        DType("complex128", 16),
        DType("bool", 1),
        *(DType(f"{sign}int{8 * size}", size) for size in (1, 2, 4, 8) for sign in ("", "u")),
    )
}


def dtype_named(name: str) -> DType:
    """Return a type. Raises: ConfigError listing the known names."""
    try:
        return DTYPES[name]
    except KeyError:
        known = ", ".join(DTYPES)
        raise ConfigError(f"{name!r} is no type of number that a snapshot holds; it holds {known}") from None
