"""Which pixel of the stored picture each pixel of the result comes from.

Crops, a resize and flips are composed here as a value before a single pixel is decoded, so that they cost
one pass together and only the region that is needed is decoded.
"""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of whole pixels: rows top to top + height, columns left to left + width."""

    top: int
    left: int
    height: int
    width: int


class Geometry(NamedTuple):
    """The picture's `box`, resampled to `resized`, of which `window` is kept, then mirrored.

    picture            resized                 result
    +-----------+      +---------+
    |  +----+   |      | +-----+ |
    |  |box |   |  ->  | |win- | |     ->      window, mirrored as the flags say
    |  +----+   |      | |dow  | |
    +-----------+      +---------+
    """

    box: Box
    resized: tuple[int, int]
    window: Box
    is_mirrored: bool = False
    is_upside_down: bool = False
    antialias: bool = True

    @classmethod
    def whole(cls, height: int, width: int) -> Geometry:
        """The picture as it is."""
        box = Box(0, 0, height, width)
        return cls(box, (height, width), box)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the result."""
        return self.window.height, self.window.width

    @property
    def is_resampled(self) -> bool:
        return self.resized != (self.box.height, self.box.width)

    def cropped(self, crop: Box) -> Geometry:
        """Keep `crop`, a box within the result."""
        top, left, height, width = crop
        if self.is_upside_down:
            top = self.window.height - top - height
        if self.is_mirrored:
            left = self.window.width - left - width
        if not self.is_resampled:
            kept = Box(self.box.top + top, self.box.left + left, height, width)
            return self._replace(box=kept, resized=(height, width), window=Box(0, 0, height, width))
        return self._replace(window=Box(self.window.top + top, self.window.left + left, height, width))

    def can_resize(self) -> bool:
        """Whether one resampling expresses what `resized_to` would add (a second one needs its own pass)."""
        return not self.is_resampled

    def resized_to(self, height: int, width: int, antialias: bool) -> Geometry:
        """Resample the result to height x width."""
        assert self.can_resize(), "a picture is resampled once per pass"
        return self._replace(resized=(height, width), window=Box(0, 0, height, width), antialias=antialias)

    def mirrored(self) -> Geometry:
        return self._replace(is_mirrored=not self.is_mirrored)

    def upside_down(self) -> Geometry:
        return self._replace(is_upside_down=not self.is_upside_down)


def center_box(height: int, width: int, target: tuple[int, int]) -> Box:
    """Return torchvision's central crop: the offset is half the difference, rounded half to even."""
    return Box(round((height - target[0]) / 2.0), round((width - target[1]) / 2.0), *target)
