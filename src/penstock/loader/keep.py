"""How a user says in which form memory keeps samples."""

from __future__ import annotations

import math

from penstock.errors import ConfigError
from penstock.policy.forms import CropForm

STORED, CROPS = "stored", "crops"
#: For how many epochs random crops are made at a time, unless the user says.
_EPOCHS = 3


def check_keep(keep: object) -> int | None:
    """Return for how many epochs crops are kept as keep= says, 0 where it says none; None for samples as stored.

    Raises: ConfigError unless it is "stored", "crops" or "3 crops".
    """
    if keep == STORED:
        return None
    if keep == CROPS:
        return 0
    count, _, what = keep.partition(" ") if isinstance(keep, str) else ("", "", "")
    if what != CROPS or not count.isdecimal() or int(count) < 2:
        raise ConfigError(
            f'keep is {keep!r:.80}; it is "stored", "crops", or crops of so many epochs, 2 or more, such as "3 crops"'
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
            f'are kept on one rank, so give keep="{STORED}"'
        )
    return CropForm(math.prod(shape), (epochs or _EPOCHS) if is_random else 0)
