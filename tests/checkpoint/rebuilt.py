"""States put together from a tree and tensors in memory, without any file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from penstock.checkpoint.state.flatten import Flat
from penstock.checkpoint.state.tensors import Bytes, Layout
from penstock.checkpoint.state.tree import JSON, read_tree
from penstock.checkpoint.state.unflatten import Loading, plan_loading, plan_loading_into


class Tensor(NamedTuple):
    layout: Layout
    data: Bytes


def tensors_of(flat: Flat) -> list[Tensor]:
    return [Tensor(source.layout, source.data()) for source in flat.sources]


def unflatten(tree: JSON, tensors: Iterable[Tensor], **options: Any) -> Any:
    """Return a new state. options: of `plan_loading`."""
    by_name = {tensor.layout.name: tensor for tensor in tensors}
    layouts = [tensor.layout for tensor in by_name.values()]
    loading = plan_loading(read_tree(tree, layouts), **options)
    return _filled(loading, by_name).state()


def load_into(into: Any, tree: JSON, tensors: Iterable[Tensor], **options: Any) -> Loading:
    """Copy a state into one that is there. options: of `plan_loading_into`."""
    by_name = {tensor.layout.name: tensor for tensor in tensors}
    layouts = [tensor.layout for tensor in by_name.values()]
    loading = _filled(plan_loading_into(into, read_tree(tree, layouts), **options), by_name)
    loading.state()
    return loading


def _filled(loading: Loading, tensors: dict[str, Tensor]) -> Loading:
    for destination in loading.destinations:
        np.copyto(destination.memory, tensors[destination.layout.name].data)
        destination.finish()
    return loading
