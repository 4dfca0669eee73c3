"""Gradients are not traced unless a test asks: make_fx makes PyTorch import its Python kernels, which takes seconds."""

from __future__ import annotations

import pytest

from penstock.graph.ops import vjp


@pytest.fixture(autouse=True)
def _gradients_are_not_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(vjp, "TRACED_FROM_USE", 1 << 60)
