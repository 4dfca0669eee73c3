"""A measured throughput as a function of how many use it at once."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that were measured, joined by straight lines.

    points: (users, bytes per second), users strictly increasing; users are threads, clients or reads in
        flight, at least one point, every number finite and above zero.
    Raises: ConfigError if the points are empty, unordered, repeated, or not finite and above zero.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("the curve has no points: give at least one, for example 1 user at 200 MB/s")
        for users, rate in self.points:
            if not (math.isfinite(users) and users > 0):
                raise ConfigError(f"{users!r} users: a curve's users must be a finite number above zero")
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(
                    f"{rate!r} bytes/s at {users:g} users: a rate must be finite and above zero"
                )
        for (before, _), (users, _) in zip(self.points, self.points[1:], strict=False):
            if users == before:
                raise ConfigError(f"{users:g} users occur twice: keep one of the two points")
            if users < before:
                raise ConfigError(f"{users:g} users follow {before:g}: sort the points by users")

    @classmethod
    def flat(cls, bytes_per_second: float) -> Curve:
        """Return the curve of a throughput that does not depend on the number of users."""
        return cls(((1.0, bytes_per_second),))

    def at(self, users: float) -> float:
        """Return the throughput for a number of users, in bytes per second.

        Between two points it is on the line that joins them; outside it is that of the nearest point.
        Source: thesis, equation 4.1.
        """
        points = self.points
        above = bisect_right(points, users, key=_users)
        if above == 0:
            return points[0][1]
        if above == len(points):
            return points[-1][1]
        (x0, y0), (x1, y1) = points[above - 1], points[above]
        return y0 + (users - x0) * ((y1 - y0) / (x1 - x0))


def _users(point: tuple[float, float]) -> float:
    return point[0]
