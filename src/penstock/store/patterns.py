"""Which files are meant by a path, a pattern such as `train-{000..099}.tar` or `*.npy`, or a list of these.

    "train-{000..099}.tar"      numbers in braces, with as many digits as the first one has
    "{train,extra}-*.tar"       words in braces; `*`, `?`, `[...]` and `**` as in a shell, in the order of names

A path that exists is that file or folder, whatever characters it has.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import ConfigError, DataError

#: One path or pattern, or several.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BETWEEN = "\n"
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
_MOST_FILES = 1_000_000


def place_of_paths(paths: Paths) -> str:
    """Return paths or patterns as one text, absolute, which `files_of` takes: several with a line end between them.

    A `~` at the beginning is the home folder.
    Raises: ConfigError for what is no path, and for an address.
    """
    if isinstance(paths, (list, tuple)):
        if not paths:
            raise ConfigError("the list of paths is empty: give one path at least")
        places = [_absolute(path) for path in paths]
        if wrong := [place for place in places if _BETWEEN in place]:
            raise ConfigError(f"{wrong[0]!r} has a line end in its name: rename it, or give its folder")
        return _BETWEEN.join(places)
    return _absolute(paths)


def is_of_several(place: str) -> bool:
    """Return whether it is a list or a pattern, and not what exists under that name."""
    return (
        _BETWEEN in place or bool(_BRACES.search(place)) or glob.has_magic(place)
    ) and not os.path.lexists(place)


def files_of(place: str) -> tuple[str, ...]:
    """Return the files that are meant, in the order of the list, of the numbers, or of their names.

    Raises: DataError for a pattern that no file fits; ConfigError for one that means more than a million.
    """
    found: list[str] = []
    for pattern in place.split(_BETWEEN) if is_of_several(place) else [place]:
        if not is_of_several(pattern):
            found.append(pattern)
            continue
        for path in _without_braces(pattern):
            if glob.has_magic(path) and not os.path.lexists(path):
                fitting = sorted(glob.iglob(path, recursive=True))
                if not fitting:
                    raise DataError(
                        f"no file fits {path}: check the pattern, and that its file system is mounted"
                    )
                found += fitting
            else:
                found.append(path)
            if len(found) > _MOST_FILES:
                raise ConfigError(
                    f"{pattern} means more than {_MOST_FILES:,} files: correct the numbers in braces"
                )
    return tuple(found)


def brief(place: str) -> str:
    """Return a place for people: of a list the first path, and how many there are."""
    first, *others = place.split(_BETWEEN)
    return f"{first} and {len(others):,} more" if others and is_of_several(place) else place


def _without_braces(pattern: str) -> Iterator[str]:
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    inside, before, behind = braces[1], pattern[: braces.start()], pattern[braces.end() :]
    if numbers := _NUMBERS.fullmatch(inside):
        first, last = map(int, numbers.groups())
        step = 1 if first <= last else -1
        digits = len(numbers[1]) if numbers[1].startswith("0") or len(numbers[1]) == len(numbers[2]) else 0
        options: Any = (f"{number:0{digits}d}" for number in range(first, last + step, step))
    else:
        options = inside.split(",")
    for option in options:
        yield from _without_braces(before + option + behind)


def _absolute(path: Any) -> str:
    try:
        text = os.path.expanduser(path)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} is not the path of a folder or of a list of files: give one")
    if "://" in text:
        raise ConfigError(
            f"{path!r} is an address, and what is read here is a folder or a list of files: mount it and give the "
            "path, or give a Source of your own"
        )
    return os.path.abspath(text)
