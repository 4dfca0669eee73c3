"""Which files are meant by a path, a pattern such as `train-{000..099}.tar` or `*.npy`, or a list of these.

    "train-{000..099}.tar"      numbers in braces, with as many digits as the first one has
    "{train,extra}-*.tar"       words in braces; `*`, `?`, `[...]` and `**` as in a shell, in the order of names

A path that exists is that file or folder, whatever characters it has.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import ConfigError, DataError
from penstock.store.object_store import check_address, is_address, without_secrets
from penstock.store.remote import Objects

#: One path or pattern, or several.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BETWEEN = "\n"
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
_MOST_FILES = 1_000_000


def place_of_paths(paths: Paths) -> str:
    """Return paths or patterns as one text, absolute, which `files_of` takes: several with a line end between them.

    A `~` at the beginning is the home folder. Addresses, such as s3://bucket/train, stay as they are.
    Raises: ConfigError for what is no path, and for addresses among paths.
    """
    if isinstance(paths, (list, tuple)):
        if not paths:
            raise ConfigError("the list of paths is empty: give one path at least")
        places = [_absolute(path) for path in paths]
        if wrong := [place for place in places if _BETWEEN in place]:
            raise ConfigError(f"{wrong[0]!r} has a line end in its name: rename it, or give its folder")
        if len(set(map(is_address, places))) > 1:
            raise ConfigError("the list has paths and addresses: give one kind, or two data sets")
        return _BETWEEN.join(places)
    return _absolute(paths)


def is_of_several(place: str) -> bool:
    """Return whether it is a list or a pattern, and not what exists under that name."""
    if is_address(place):
        return _BETWEEN in place or bool(_BRACES.search(place)) or glob.has_magic(place)
    return (
        _BETWEEN in place or bool(_BRACES.search(place)) or glob.has_magic(place)
    ) and not os.path.lexists(place)


def files_of(place: str, objects: Objects | None = None) -> tuple[str, ...]:
    """Return the files that are meant, in the order of the list, of the numbers, or of their names.

    objects: what reads addresses.
    Raises: DataError for a pattern that no file fits; ConfigError for one that means more than a million.
    """
    found: list[str] = []
    for pattern in place.split(_BETWEEN) if is_of_several(place) else [place]:
        if not is_of_several(pattern):
            found.append(pattern)
            continue
        for path in _without_braces(pattern):
            if objects is not None and is_address(path):
                found += _fitting(path, objects) if glob.has_magic(path) else [path]
            elif glob.has_magic(path) and not os.path.lexists(path):
                fitting = sorted(glob.iglob(path, recursive=True))
                if not fitting:
                    raise _nothing_fits(path)
                found += fitting
            else:
                found.append(path)
            if len(found) > _MOST_FILES:
                raise ConfigError(
                    f"{pattern} means more than {_MOST_FILES:,} files: correct the numbers in braces"
                )
    if len(set(found)) < len(found):
        twice = next(path for path, count in Counter(found).items() if count > 1)
        raise ConfigError(f"{brief(twice)} is listed twice in {brief(place)}: give each file once")
    return tuple(found)


def _nothing_fits(pattern: str) -> DataError:
    """Return what to raise for a pattern that no file fits."""
    folder = pattern
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    try:
        os.scandir(folder).close()
    except PermissionError:
        return DataError(
            f"no file fits {pattern}: {folder} may not be listed by user {os.geteuid()}: give read permission to it"
        )
    except OSError as error:
        return DataError(
            f"no file fits {pattern}: {folder} cannot be listed: {error.strerror}; check the path"
        )
    return DataError(f"no file fits {pattern}: check the pattern, and that its file system is mounted")


def brief(place: str) -> str:
    """Return a place for people: of a list the first path, and how many there are."""
    first, *others = without_secrets(place).split(_BETWEEN)
    return f"{first} and {len(others):,} more" if others and is_of_several(place) else place


def _fitting(pattern: str, objects: Objects) -> list[str]:
    """Return the objects that fit a pattern, sorted. `*` and `?` stand for no `/`, `**` for any number of folders."""
    folder = pattern[: min(pattern.find(sign) for sign in "*?[" if sign in pattern)].rpartition("/")[0]
    if pattern[len(folder) :].count("/") > 1:
        names = [each.address for each in objects.walk(folder)]
    else:
        names = [each.address for each in objects.level(folder)[0]]
    fits = re.compile(_expression(pattern))
    found = sorted(name for name in names if fits.fullmatch(name))
    if not found:
        raise DataError(
            f"no object fits {without_secrets(pattern)}, asked as {objects.identity(pattern)}: check the pattern, and "
            "that this identity may list it"
        )
    return found


def _expression(pattern: str) -> str:
    parts = []
    for part in re.split(r"(\*\*/|\*|\?|\[[^]]*\])", pattern):
        fixed = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}.get(part)
        is_set = part.startswith("[") and part.endswith("]")
        parts.append(fixed or (fnmatch.translate(part)[4:-3] if is_set else re.escape(part)))
    return "".join(parts)


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
        # What is made of an address by pathlib has lost a slash.
        text = os.fspath(path)
        text = text if isinstance(text, str) and is_address(text) else os.path.expanduser(path)
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} is not the path of a folder or of a list of files: give one")
    if text.startswith("pipe:"):
        raise ConfigError(
            f"{text:.80} runs a command, and samples are read at random: give the files or the address "
            "that the command reads, such as s3://bucket/train-{000..099}.tar, or what it writes, as files"
        )
    if is_address(text):
        if text.startswith("file://"):
            return os.path.abspath(text.removeprefix("file://"))
        check_address(text)
        return text if text.endswith("://") else text.rstrip("/")
    return os.path.abspath(text)
