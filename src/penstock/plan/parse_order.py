"""Orders by name, as commands take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import ConfigError
from penstock.plan.explicit import Explicit
from penstock.plan.orders import BundleShuffle, FullShuffle, Order, Sequential
from penstock.plan.scattered import Scattered
from penstock.plan.torch_order import TorchShuffle, TwisterState

_KNOWN = (
    "known are full, torch, sequential, bundle, one like bundle:0.05, scattered- before the last three, and files of "
    "ids, like ids.npy or ids.txt"
)
_SCATTERED = "scattered-"
_ENDINGS = (".npy", ".txt")


@dataclass(frozen=True, slots=True)
class OrderName:
    """An order by name, for any number of samples.

    name: "full", "torch", "sequential", "bundle", or "bundle:" and a ratio; the last three also behind "scattered-".
        "torch" is what a DataLoader with shuffle=True reads by generator=torch.Generator().manual_seed(seed). What
        ends in .npy or .txt is a file of ids, see `Explicit.from_file`.
    Raises: ConfigError for another name, or a ratio that `BundleShuffle` refuses.

    >>> OrderName("scattered-bundle:0.25").of(samples=8, seed=1)
    Scattered(order=BundleShuffle(samples=8, seed=1, bundle_ratio=0.25, alternate=True), seed=1)
    """

    name: str
    #: Whether `Scattered` permutes the ids.
    is_scattered: bool = field(init=False)
    #: "full", "torch", "sequential", "bundle" or "file".
    kind: str = field(init=False)
    #: Size of a bundle relative to the samples that are shuffled together; None where there is none.
    bundle_ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        if Path(self.name).suffix in _ENDINGS:
            for name, value in (("is_scattered", False), ("kind", "file"), ("bundle_ratio", None)):
                object.__setattr__(self, name, value)
            return
        kind, colon, ratio = self.name.removeprefix(_SCATTERED).partition(":")
        is_scattered = self.name.startswith(_SCATTERED)
        if kind not in ("full", "torch", "sequential", "bundle") or (colon and kind != "bundle"):
            raise ConfigError(f"there is no order {self.name!r}; {_KNOWN}")
        if is_scattered and kind in ("full", "torch"):
            raise ConfigError(
                f"order is {self.name!r}; a full shuffle of scattered ids is a full shuffle: {kind}"
            )
        object.__setattr__(self, "is_scattered", is_scattered)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(
            self, "bundle_ratio", self._ratio(ratio if colon else None) if kind == "bundle" else None
        )

    def _ratio(self, written: str | None) -> float:
        if written is None:
            return BundleShuffle(1).bundle_ratio
        try:
            ratio = float(written)
        except ValueError:
            raise ConfigError(f"order is {self.name!r}; after bundle: stands a ratio, like 0.05") from None
        return BundleShuffle(1, bundle_ratio=ratio).bundle_ratio  # says what is wrong with it

    def of(self, samples: int, seed: int) -> Order:
        """Return the order of so many samples. Raises: ConfigError or OSError for a file that is not one of theirs."""
        order: Order
        if self.kind == "file":
            return Explicit.from_file(self.name, samples)
        if self.kind == "torch":
            return TorchShuffle(samples, TwisterState.from_seed(seed))
        if self.bundle_ratio is not None:
            order = BundleShuffle(samples, seed, self.bundle_ratio)
        else:
            order = FullShuffle(samples, seed) if self.kind == "full" else Sequential(samples)
        return Scattered(order, seed) if self.is_scattered else order
