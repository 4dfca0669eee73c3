"""What can go wrong with a graph: one class per kind, whose text names the node and where it was made.

GraphError (PenstockError)
├── MismatchError (ValueError)       dtype, shape, number of carries or branch results, attributes, a fed array
├── UnknownOperationError (ValueError)
├── DuplicateError (ValueError)      two nodes of one name
├── CycleError (ValueError)          a cycle that no NextIteration closes
├── NotFoundError (LookupError)      an input, control input, port, fetch, target, feed or saved tensor
├── MissingFeedError (ValueError)    a Placeholder that the run needs
├── UninitializedError (RuntimeError)
├── DeadFetchError (RuntimeError)    a fetched tensor of a branch that was not taken
├── CancelledError (RuntimeError)    Enqueue on a closed queue; a run of a closed session
├── OutOfRangeError (LookupError)    Dequeue on a closed and drained queue; a reader at its end
├── KernelError (RuntimeError)       a kernel raised; `__cause__` is what it raised
├── CorruptError (ValueError)        a damaged record or graph text
├── InfeasibleError (ValueError)     placement: no device can run a node
├── UnsupportedError (NotImplementedError)
├── VersionError (RuntimeError)      a worker has another version of Penstock or PyTorch
└── WorkerLostError (RuntimeError)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

from penstock.errors import PenstockError


class GraphError(PenstockError):
    """Base of every error of a graph.

    kind: one word per class, such as "mismatch"; node: name of the node, "" if none is to blame; where: the place of
    its creation (file:line), "" if unknown.
    """

    kind: ClassVar[str] = "graph"

    def __init__(self, text: str, *, node: str = "", where: str = "") -> None:
        named = f"node {node!r}" + (f" ({where})" if where else "") + ": " if node else ""
        super().__init__(named + text)
        self.node = node
        self.where = where
        self.text = text


class MismatchError(GraphError, ValueError):
    """Dtypes, shapes, attributes or counts that do not fit each other."""

    kind = "mismatch"


class UnknownOperationError(GraphError, ValueError):
    """No operation of this name."""

    kind = "unknown_op"


class DuplicateError(GraphError, ValueError):
    """Two nodes of one name."""

    kind = "duplicate"


class CycleError(GraphError, ValueError):
    """A cycle that no NextIteration closes."""

    kind = "cycle"


class NotFoundError(GraphError, LookupError):
    """A node, port or saved tensor that is not there."""

    kind = "not_found"


class MissingFeedError(GraphError, ValueError):
    """A run needs a Placeholder that was not fed."""

    kind = "missing_feed"


class UninitializedError(GraphError, RuntimeError):
    """A Variable was read before it was assigned."""

    kind = "uninitialized"


class DeadFetchError(GraphError, RuntimeError):
    """A fetched tensor was not computed: its branch was not taken."""

    kind = "dead_fetch"


class CancelledError(GraphError, RuntimeError):
    """The queue or the session was closed."""

    kind = "cancelled"


class OutOfRangeError(GraphError, LookupError):
    """A closed queue has no more elements, or a reader no more records."""

    kind = "out_of_range"


class KernelError(GraphError, RuntimeError):
    """A kernel raised; `__cause__` holds what."""

    kind = "kernel"


class CorruptError(GraphError, ValueError):
    """A record, or the text of a graph, is damaged."""

    kind = "corrupt"


class InfeasibleError(GraphError, ValueError):
    """No device can run a node, or all nodes of its group."""

    kind = "infeasible"


class UnsupportedError(GraphError, NotImplementedError):
    """Refused on purpose."""

    kind = "unsupported"


class VersionError(GraphError, RuntimeError):
    """A worker has another version of Penstock or PyTorch than its client."""

    kind = "version"


class WorkerLostError(GraphError, RuntimeError):
    """A worker ended or stopped answering."""

    kind = "worker_lost"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'a', 'b'?" for the names most like `name`, whatever their case, or ""."""
    by_folded: dict[str, list[str]] = {}
    for each in known:
        by_folded.setdefault(each.casefold(), []).append(each)
    close = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.5)
    found = [each for folded in close for each in by_folded[folded]]
    return f"; did you mean {', '.join(map(repr, found))}?" if found else ""
