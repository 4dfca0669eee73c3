"""What moves pixels: compiled kernels, or the same in NumPy until they are compiled."""

from __future__ import annotations

from collections.abc import Callable

from penstock.compiling import Part
from penstock.loader.transforms import plain
from penstock.machine_code import Signature

_AXIS = ("float64", "float64", "int64", "int64", "int64", "int64", "boolean")


def _signature(out: str, *parameters: str) -> Signature:
    before = ("uint8[:]", "int64", "int64", _AXIS, _AXIS, "int64", "int64", "uint8[:]")
    return Signature((*before, *parameters, f"{out}[:, :, :]", "boolean"))


#: By what they write: float32, the uint16 that a table holds for each byte, or the bytes.
SIGNATURES = {
    "float32": _signature("float32", "float32[:]", "float32[:]"),
    "table": _signature("uint16", "uint16[:, :]"),
    "uint8": _signature("uint8"),
}
KERNELS = {
    name: Part(
        "penstock.loader.transforms.kernels",
        name,
        signature,
        f"how pictures are resampled ({name})",
        "NumPy does it, more slowly,",
    )
    for name, signature in SIGNATURES.items()
}


def _group_signature(out: str, *parameters: str) -> Signature:
    bound = (
        "int64[:]",
        "int64",
        "float64[:, :]",
        "uint64[:]",
        "float64[:]",
        "uint8[:]",
        "uint8[:]",
        parameters,
    )
    group = ("int64[:, :]", "int64[:]", "int64", f"{out}[:, :, :, :]")
    return Signature((*bound, "boolean", *group), results=("int64",))


#: By what they write, as SIGNATURES.
GROUP_SIGNATURES = {
    "group_float32": _group_signature("float32", "float32[:]", "float32[:]"),
    "group_table": _group_signature("uint16", "uint16[:, :]"),
    "group_uint8": _group_signature("uint8"),
}
GROUP_KERNELS = {
    name: Part(
        "penstock.loader.transforms._group_kernels",
        name,
        signature,
        f"how JPEG files are decoded by the group ({name.removeprefix('group_')})",
        "they are decoded one by one, more slowly,",
    )
    for name, signature in GROUP_SIGNATURES.items()
}


def resampler(name: str) -> Callable[..., None]:
    """Return the function that writes resampled pixels; see `kernels.resample_to_float32` and its sisters.

    name: one of KERNELS.
    """
    return KERNELS[name].ask() or getattr(plain, f"resample_to_{name}")
