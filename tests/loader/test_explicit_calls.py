"""How often a loader calls the function of an `Explicit` order: it may be costly, and is somebody's own code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.loader import Loader
from penstock.plan import Explicit, explicit
from penstock.ranks import alone

EPOCHS = 5


class Numbers:
    """A data set whose samples are their numbers."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return np.int64(index)


def run(asked: Counter[int], state: Any = None, **arguments: Any) -> tuple[list[list[int]], Any]:
    """Return what the epochs of a run read, and its state in the middle of its epoch 2; count the calls by epoch."""

    def ids(epoch: int) -> NDArray[np.int64]:
        asked[epoch] += 1
        return np.random.default_rng(epoch).permutation(50)[: 40 + epoch]

    order = Explicit(ids, 50)
    arguments = {"batch_size": 8, "epochs": EPOCHS, "drop_last": True, **arguments}
    read, saved = [], None
    with Loader(Numbers(), shuffle=order, report=None, ranks=alone, state=state, **arguments) as loader:
        while loader.position[0] < EPOCHS:
            batches = []
            for batch in loader:
                batches += batch.tolist()
                if loader.position == (2, 3):
                    saved = loader.state_dict()
            read.append(batches)
    return read, saved


@for_each("arguments", [{}, {"epochs": None, "steps": 25}, {"rank": 1, "world_size": 2}, {"decoders": 0}])
def test_the_function_is_called_once_for_each_epoch_and_once_in_a_run_that_resumes(
    arguments: dict[str, Any],
) -> None:
    asked = Counter[int]()
    whole, state = run(asked, **arguments)
    assert asked == dict.fromkeys(range(EPOCHS), 1)

    asked.clear()
    rest, _ = run(asked, state, **arguments)
    assert asked == dict.fromkeys(range(EPOCHS), 1)
    assert rest[1:] == whole[3:]
    assert whole[2][-len(rest[0]) :] == rest[0]


def test_where_the_ids_of_all_epochs_are_not_kept_it_is_called_for_lengths_for_the_state_and_for_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explicit, "_EPOCHS_KEPT", 2)
    monkeypatch.setattr(explicit, "_BYTES_KEPT", 1)
    asked = Counter[int]()
    run(asked)
    assert max(asked.values()) <= 3
