"""What a source says of its samples besides their bytes: labels of one kind, or of several by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError

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


def check_names(**names: object) -> None:
    """Raise ConfigError for what is neither None nor the name of a column, feature or array."""
    for argument, name in names.items():
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f'{argument} is {name!r:.80}; it is a name, such as "{argument}"')


def in_classes(
    classes: Sequence[str] | None, labels: Labels, names: Sequence[str], describe: Callable[[int], str]
) -> tuple[Labels, tuple[str, ...]]:
    """Return labels as numbers of the user's classes, such as those of the training's source, and these classes.

    classes: None leaves all as it is. labels, names: of the source, what the numbers stand for.
    describe: names a sample, for errors.
    Raises: DataError naming the first sample of another class; ConfigError where labels are no classes.
    """
    if classes is None:
        return labels, tuple(names)
    numbers = {name: number for number, name in enumerate(check_classes(classes))}
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or not names:
        raise ConfigError("classes are given, and labels of the source are no names: leave classes out")
    # Behind the last, -1 stands for no label, which stays.
    places = np.array([*(numbers.get(name, -2) for name in names), -1], np.int64)
    found: NDArray[np.int64] = places[labels]
    if (wrong := found == -2).any():
        position = int(wrong.argmax())
        raise DataError(
            f"{describe(position)} has label {names[labels[position]]!r:.80}, which classes= does not have "
            f"({len(numbers):,} names): correct one of the two"
        )
    found.flags.writeable = False
    return found, tuple(classes)


def check_classes(classes: object) -> tuple[str, ...]:
    """Return the names of classes as the user gave them. Raises: ConfigError unless they are texts, each once."""
    if (
        isinstance(classes, str)
        or not isinstance(classes, Sequence)
        or not all(isinstance(each, str) for each in classes)
    ):
        raise ConfigError(f"classes is {classes!r:.80}; it is a list of names, such as train.classes")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise ConfigError(f"classes has {twice!r:.80} twice: name each once")
    return tuple(classes)


def _checked(name: str, values: Any, samples: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "biufc" or array.ndim == 0 or len(array) != samples:
        raise ConfigError(
            f"{name} of the source is {array.dtype}{list(array.shape)}; it is an array of numbers with a row for each "
            f"of the {samples:,} samples: number names, and pad what differs in length"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)
