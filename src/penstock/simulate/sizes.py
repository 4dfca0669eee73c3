"""How large the samples are: drawn from a distribution, or those of a real folder.

A draw is the inverse of the distribution function at a counter-based uniform number, so that any distribution will do,
and the size of sample k depends on the seed and on k alone, however many samples there are. Values that cannot be a
size are drawn again alone, as the reference simulator of the thesis (4.1.2) does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.plan.orders import check_samples, check_seed
from penstock.plan.random import derive_key, generator_for
from penstock.units import is_integer

Sizes = NDArray[np.int64]
Floats = NDArray[np.float64]

#: A size beyond this is no sample's; sums of sizes stay within 64 bits.
_LARGEST_BYTES = 2**53
#: Samples whose uniform numbers come from one stream; their temporaries stay in a second-level cache.
_CHUNK = 1 << 16
_MOST_REDRAWS = 1_000
#: Sizes of more take 32 GB by themselves, before anything is simulated.
_MOST_SAMPLES = 4 * 10**9
#: Found without SciPy, so that the ordinary scenario needs it as little as it needs its start-up time.
_OWN = ("constant", "normal", "uniform")

Parameters = Mapping[str, float] | tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class SizeDistribution:
    """Sizes drawn from a distribution.

    name: ``"normal"``, ``"uniform"``, ``"constant"``, or a distribution of `scipy.stats` by its name there.
    samples: F, from 1 to 4 * 10**9.
    parameters: ``loc`` and ``scale`` in bytes, as SciPy means them (normal: mean and standard deviation; uniform: from
        loc to loc + scale), and the distribution's shape parameters by their names there, which are plain numbers.
        ``loc`` is 0 unless given; ``scale`` is above 0, or 0 for normal and uniform, whose sizes then are all equal;
        constant and discrete distributions have no ``scale``. Kept as pairs, sorted.
    min_bytes, max_bytes: both inclusive; a value outside of them, after rounding to a byte, is drawn again alone.
    Raises: ConfigError naming the parameter, or where SciPy is needed and not installed.
    """

    name: str
    samples: int
    parameters: Parameters = ()
    min_bytes: int = 1
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(sorted(dict(self.parameters).items())))
        check_samples(self.samples)
        if self.samples > _MOST_SAMPLES:
            raise ConfigError(
                f"samples is {self.samples:,}; at most {_MOST_SAMPLES:,} sizes are drawn, which take "
                f"{8 * _MOST_SAMPLES / 1e9:g} GB: simulate a part of the data set"
            )
        self._check_bounds()
        for parameter, value in self._values().items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{parameter} is {value!r}; a distribution's parameters are finite numbers")
        scale = self._values().get("scale", 1.0)
        may_be_zero = self.name in ("norm", *_OWN)
        if scale < 0 or (scale == 0 and not may_be_zero):
            raise ConfigError(
                f"scale is {scale!r}; it must be {'zero or more' if may_be_zero else 'above zero'}"
            )
        middle = self._quantile()(np.array([0.5]))
        if not np.isfinite(middle).all():
            given = ", ".join(f"{parameter} = {value:g}" for parameter, value in self._values().items())
            raise ConfigError(f"{self.name} has no values for {given}: see scipy.stats.{self.name}")

    def sizes_bytes(self, seed: int) -> Sizes:
        """Return the size of each sample: int64[F]; the same for the same seed.

        Raises: ConfigError if hardly any value of the distribution lies between min_bytes and max_bytes.
        """
        check_seed(seed)
        key = derive_key(seed, "sizes")
        quantile = self._quantile()
        least, most = self.min_bytes, _LARGEST_BYTES if self.max_bytes is None else self.max_bytes
        sizes = np.empty(self.samples, np.int64)
        for chunk, begin in enumerate(range(0, self.samples, _CHUNK)):
            part = sizes[begin : begin + _CHUNK]
            pending = np.arange(part.size)
            for redraw in range(_MOST_REDRAWS):
                values = np.rint(quantile(_uniform(key, redraw, chunk, part.size)[pending]))
                accepted = (values >= least) & (values <= most)
                part[pending[accepted]] = values[accepted].astype(np.int64)
                pending = pending[~accepted]
                if not pending.size:
                    break
            else:
                raise ConfigError(
                    f"{self.name} has hardly a value from {least:,} to {most:,} bytes: after {_MOST_REDRAWS:,} draws "
                    f"{pending.size:,} of {part.size:,} samples have no size; correct the parameters, min or max"
                )
        return sizes

    def _values(self) -> dict[str, float]:
        return dict(self.parameters)

    def _check_bounds(self) -> None:
        for bound, value in (("min_bytes", self.min_bytes), ("max_bytes", self.max_bytes)):
            if value is None and bound == "max_bytes":
                continue
            if not is_integer(value):
                raise ConfigError(f"{bound} is {value!r}; it must be an integer, in bytes")
            if not 0 <= value <= _LARGEST_BYTES:
                raise ConfigError(f"{bound} is {value}; it must be from 0 to 2**53 bytes")
        if self.max_bytes is not None and self.max_bytes < self.min_bytes:
            raise ConfigError(f"max_bytes is {self.max_bytes}, below min_bytes, which is {self.min_bytes}")

    def _quantile(self) -> Callable[[Floats], Floats]:
        """Return the inverse of the distribution function, from (0, 1) to bytes."""
        values = self._values()
        match "normal" if self.name == "norm" else self.name:
            case "normal":
                self._check_parameters("loc", "scale", required=("loc", "scale"))
                return lambda uniform: values["loc"] + values["scale"] * _normal_quantile(uniform)
            case "uniform":
                self._check_parameters("loc", "scale", required=("scale",))
                return lambda uniform: values.get("loc", 0.0) + values["scale"] * uniform
            case "constant":
                self._check_parameters("loc", required=("loc",))
                return lambda uniform: np.full(uniform.shape, float(values["loc"]))
        distribution = self._in_scipy()
        shapes = distribution.shapes.split(", ") if distribution.shapes else []
        scale = [] if _is_discrete(distribution) else ["scale"]
        self._check_parameters(*shapes, "loc", *scale, required=(*shapes, *scale))

        def quantile(uniform: Floats) -> Floats:
            return np.asarray(distribution.ppf(uniform, **values), np.float64)

        return quantile

    def _in_scipy(self) -> Any:
        try:
            from scipy import stats
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"distribution {self.name!r} needs SciPy, which is not installed: pip install 'penstock[study]', "
                f"or use one of {', '.join(_OWN)}"
            ) from error
        found = getattr(stats, self.name, None) if isinstance(self.name, str) else None
        if isinstance(found, stats.rv_continuous | stats.rv_discrete):
            return found
        kinds = (stats.rv_continuous, stats.rv_discrete)
        known = sorted({*_OWN, *(name for name in dir(stats) if isinstance(getattr(stats, name), kinds))})
        close = get_close_matches(str(self.name), known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"distribution {self.name!r} is not known; {hint}The known ones are {', '.join(known)}"
        )

    def _check_parameters(self, *known: str, required: tuple[str, ...]) -> None:
        values = self._values()
        for parameter in values:
            if parameter not in known:
                raise ConfigError(
                    f"{parameter} is no parameter of the distribution {self.name}; it has {', '.join(known)}"
                )
        for parameter in required:
            if parameter not in values:
                raise ConfigError(f"{parameter} is missing: the distribution {self.name} needs it")


@dataclass(frozen=True, slots=True, eq=False)
class SizesOfFolder:
    """Sizes that were found in a folder, one per sample; a simulation itself opens no files.

    path: of the folder, for messages and for writing the scenario down.
    sizes: int64[F], as `penstock.open_source(path).sizes_bytes` says; kept as a read-only copy.
    Raises: ConfigError if there are none, or one is negative.
    """

    path: str
    sizes: Sizes

    def __post_init__(self) -> None:
        found = np.array(self.sizes)
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
            raise ConfigError(
                f"sizes are {found.dtype} of shape {found.shape}; they are integers, in bytes, one per sample, "
                "at least one"
            )
        if found.min() < 0:
            raise ConfigError(f"sizes[{int(found.argmin())}] is {found.min()}; a size is not negative")
        found = found.astype(np.int64)
        found.flags.writeable = False
        object.__setattr__(self, "sizes", found)

    @property
    def samples(self) -> int:
        """F."""
        return int(self.sizes.size)

    def sizes_bytes(self, seed: int) -> Sizes:
        """Return the sizes, whatever the seed: int64[F], read-only."""
        check_seed(seed)
        return self.sizes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SizesOfFolder):
            return NotImplemented
        return self.path == other.path and np.array_equal(self.sizes, other.sizes)

    def __hash__(self) -> int:
        return hash((self.path, self.sizes.size))


def _is_discrete(distribution: Any) -> bool:
    from scipy import stats

    return isinstance(distribution, stats.rv_discrete)


def _uniform(key: int, redraw: int, chunk: int, count: int) -> Floats:
    """Return the numbers of a chunk's samples in (0, 1), open at both ends: float64[count]."""
    words = generator_for(key, redraw, chunk).bit_generator.random_raw(count)
    return np.asarray(((words >> np.uint64(11)) + 0.5) * 2.0**-53, np.float64)


# Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988),
# PPND16; coefficients from the highest power down.
# fmt: off
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)
_TAIL = (
    (7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966, 0.148103976427480074590,
     0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 0.0265321895265761230930,
     0.296560571828504891230, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     0.0148753612908506148525, 0.136929880922735805310, 0.599832206555887937690, 1.0),
)
# fmt: on


def _normal_quantile(uniform: Floats) -> Floats:
    """Return the standard normal quantiles of numbers in (0, 1)."""
    centred = uniform - 0.5
    result = centred * _ratio(_CENTRE, 0.180625 - centred * centred)
    outer = np.flatnonzero(np.abs(centred) > 0.425)
    tail = np.minimum(uniform[outer], 1.0 - uniform[outer])
    root = np.sqrt(-np.log(tail))
    size = np.where(root <= 5.0, _ratio(_TAIL, root - 1.6), _ratio(_FAR_TAIL, root - 5.0))
    result[outer] = np.copysign(size, centred[outer])
    return result


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], at: Floats) -> Floats:
    above, below = polynomials
    return np.divide(np.polyval(np.array(above), at), np.polyval(np.array(below), at), dtype=np.float64)
