"""What moves pixels: compiled kernels, or the same in NumPy until they are compiled."""

from __future__ import annotations

from collections.abc import Callable

from penstock.compiling import Part
from penstock.loader.transforms import plain
from penstock.machine_code import Signature

_AXIS = ("float64", "float64", "int64", "int64", "int64", "int64", "boolean")


def _signature(out: str, *parameters: str) -> Signature:
    before = ("uint8[:]", "int64", "int64", _AXIS, _AXIS, "int64", "int64", "uint8[:]")
    return Signature((*before, parameters, f"{out}[:, :, :]", "boolean"))


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


#: What a thread has to decode with, and the steps.
_OF_THREAD = ("int64[:]", "int64", "float64[:, :]", "uint64[:]", "float64[:]", "uint8[:]", "uint8[:]")


def _group_signature(out: str, *parameters: str) -> Signature:
    bound = (*_OF_THREAD, parameters)
    group = ("int64[:, :]", "int64", f"{out}[:, :, :, :]", "int64[:, :]", "uint8[:, :, :, :]")
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

_CROP = ("int64", "int64")


def _writer_signature(out: str, *parameters: str) -> Signature:
    return Signature((parameters, "boolean", *_CROP, "int64[:, :]", f"{out}[:, :, :, :]"), results=("int64",))


#: Crops that are kept, written as SIGNATURES.
CROP_SIGNATURES = {
    "crops_to_float32": _writer_signature("float32", "float32[:]", "float32[:]"),
    "crops_to_table": _writer_signature("uint16", "uint16[:, :]"),
    "crops_to_uint8": _writer_signature("uint8"),
    # Of float32 that a table holds for each byte: what a callable behind ToTensor gets.
    "crops_to_numbers": _writer_signature("float32", "float32[:, :]"),
}
CROP_KERNELS = {
    name: Part(
        "penstock.loader.transforms._crop_kernels",
        name,
        signature,
        f"how kept crops are used ({name.removeprefix('crops_to_')})",
        "they are dealt with one by one, more slowly,",
    )
    for name, signature in CROP_SIGNATURES.items()
}


def resampler(name: str) -> Callable[..., None]:
    """Return the function that writes resampled pixels; see `kernels.resample_to`. name: one of KERNELS."""
    return KERNELS[name].ask() or getattr(plain, f"resample_to_{name}")
