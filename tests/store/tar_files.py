"""Tar files for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Members = dict[str, bytes] | list[tuple[str, bytes]]


def write(shard: Path, members: Members, form: int = tarfile.USTAR_FORMAT) -> Path:
    shard.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(shard, "w", format=form) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return shard


def npy(array: NDArray[Any]) -> bytes:
    """Return what `numpy.save` writes."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()
