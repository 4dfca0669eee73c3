"""What a source tells of its samples besides their bytes: labels of one kind, or of several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

#: [samples, *shape] of numbers: one array, one with named fields (structured), or a mapping of arrays by name.
Labels = NDArray[Any] | Mapping[str, NDArray[Any]]


def labels_of(labels: Labels, samples: int) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Check a source's labels; return one array, or a dict where they have names.

    Whole numbers without a name become int64[samples]; all others keep type and shape, in this machine's byte order.

    Raises: ConfigError naming the field that is not one number, or array of numbers, for each sample.
    """
    if isinstance(labels, Mapping):
        return {str(name): _checked(f"labels[{name!r}]", each, samples) for name, each in labels.items()}
    array = np.asarray(labels)
    if array.dtype.names is not None:
        return {name: _checked(f"labels[{name!r}]", array[name], samples) for name in array.dtype.names}
    array = _checked("labels", array, samples)
    if array.ndim == 1 and array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ConfigError(
            f"labels of the source have {array.max():,}, which is no int64: give them a name, as in "
            "{'label': labels}, and they keep their type"
        )
    return array.astype(np.int64, copy=False) if array.ndim == 1 and array.dtype.kind in "biu" else array


def _checked(name: str, values: Any, samples: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "biufc" or array.ndim == 0 or len(array) != samples:
        raise ConfigError(
            f"{name} of the source is {array.dtype}{list(array.shape)}; it is an array of numbers with a row for each "
            f"of the {samples:,} samples: number names, and pad what differs in length"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)
