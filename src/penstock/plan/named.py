"""Orders by name, as commands take them."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.plan.orders import BundleShuffle, FullShuffle, Order, Sequential
from penstock.plan.scattered import Scattered

_KNOWN = "known are full, sequential, bundle, one like bundle:0.05, and scattered- before all but full"
_SCATTERED = "scattered-"


@dataclass(frozen=True, slots=True)
class OrderName:
    """An order by name, for any number of samples.

    name: "full", "sequential", "bundle", or "bundle:" and a ratio; all but the first also behind "scattered-".
    Raises: ConfigError for another name, or a ratio that `BundleShuffle` refuses.

    >>> OrderName("scattered-bundle:0.25").of(samples=8, seed=1)
    Scattered(order=BundleShuffle(samples=8, seed=1, bundle_ratio=0.25, alternate=True), seed=1)
    """

    name: str
    #: Whether `Scattered` permutes the ids.
    is_scattered: bool = field(init=False)
    #: "full", "sequential" or "bundle".
    kind: str = field(init=False)
    #: Size of a bundle relative to the samples that are shuffled together; None where there is none.
    bundle_ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        kind, colon, ratio = self.name.removeprefix(_SCATTERED).partition(":")
        is_scattered = self.name.startswith(_SCATTERED)
        if kind not in ("full", "sequential", "bundle") or (colon and kind != "bundle"):
            raise ConfigError(f"there is no order {self.name!r}; {_KNOWN}")
        if is_scattered and kind == "full":
            raise ConfigError(
                f"order is {self.name!r}; a full shuffle of scattered ids is a full shuffle: full"
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
        """Return the order of so many samples."""
        order: Order
        if self.bundle_ratio is not None:
            order = BundleShuffle(samples, seed, self.bundle_ratio)
        else:
            order = FullShuffle(samples, seed) if self.kind == "full" else Sequential(samples)
        return Scattered(order, seed) if self.is_scattered else order
