"""How a user says in which form memory keeps samples."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.policy.forms import CropForm, choose_form

STORED, CROPS, DECODED, AUTO = "stored", "crops", "decoded", "auto"
#: How what decoding costs comes to be in a machine: the command `penstock calibrate` knows no transforms.
MEASURING = (
    "`penstock calibrate --from run.trace` learns it from a run, and penstock.calibrate(source, decode="
    "penstock.measure.calibrate.decode_with(transforms)) measures it"
)
#: About the share of `memory=` that is left to samples that are kept.
_KEPT_SHARE = 0.75
#: For how many epochs random crops are made at a time, unless the user says.
_EPOCHS = 3


def check_keep(keep: object) -> int | None:
    """Return for how many epochs crops are kept as keep= says, 0 where it says none; None for samples as stored.

    Raises: ConfigError unless it is "stored", "crops", "3 crops", "decoded" or "auto".
    """
    if keep == STORED:
        return None
    if keep in (CROPS, DECODED, AUTO):
        return 0
    count, _, what = keep.partition(" ") if isinstance(keep, str) else ("", "", "")
    if what != CROPS or not count.isdecimal() or int(count) < 2:
        raise ConfigError(
            f'keep is {keep!r:.80}; it is "stored", "crops", crops of so many epochs, 2 or more, such as "3 crops", '
            '"decoded" or "auto"'
        )
    return int(count)


def crop_form(keep: str, shape: tuple[int, ...], ranks: int, *, is_random: bool) -> CropForm:
    """Return the form that keep= asks for. Raises: ConfigError where a run has no use for it.

    shape: of a crop. is_random: whether a sample has another one in each epoch.
    """
    epochs = check_keep(keep)
    assert epochs is not None, "it asks for crops"
    if not is_random:
        if epochs:
            raise ConfigError(
                f"keep is {keep!r}, and nothing before ToTensor or a function of yours is random, so that one crop "
                f'serves all epochs: give keep="{CROPS}"'
            )
    elif ranks > 1:
        raise ConfigError(
            f"keep is {keep!r}, and each epoch gives a rank other samples, whose crops it would not have: random crops "
            f'are kept on one rank, so give keep="{DECODED}" or "{STORED}"'
        )
    return CropForm(math.prod(shape), (epochs or _EPOCHS) if is_random else 0)


def auto_form(
    machine: Machine | None,
    memory_bytes: int,
    sizes_bytes: NDArray[np.int64],
    shape: tuple[int, ...],
    epochs: int,
    *,
    is_random: bool,
    picture_bytes: int = 0,
) -> CropForm | None:
    """Return the form that saves most by what a machine costs; None for samples as stored.

    machine: with the ranks and decode threads of the run. memory_bytes: the user's `memory=`. shape, is_random: as
        `crop_form` takes them. picture_bytes: as `choose_form` takes them.
    Raises: ConfigError where nothing says what decoding costs.
    """
    if machine is None or not machine.knows_decoding:
        missing = "no machine= says" if machine is None else "machine= does not say"
        raise ConfigError(
            f'keep is "{AUTO}", and {missing} what decoding costs (its preprocess): {MEASURING}; or choose, as '
            f'keep="{_EPOCHS} {CROPS}" or keep="{STORED}"'
        )
    if is_random and machine.ranks > 1 and not picture_bytes:
        return None
    named = sum(each.capacity_bytes for each in machine.storage[1:] if each.backend == "memory")
    capacity = min(int(_KEPT_SHARE * memory_bytes), named)
    crop_bytes = 0 if is_random and machine.ranks > 1 else math.prod(shape)
    return choose_form(
        crop_bytes, sizes_bytes, capacity, machine, epochs, is_random=is_random, picture_bytes=picture_bytes
    ).form
