"""The loading policies by name, as a scenario's assumptions want them."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from penstock.errors import ConfigError
from penstock.policy.loading import (
    DeepIO,
    Frequency,
    LbannStore,
    LoadingPolicy,
    LocalityAware,
    LowerBound,
    Naive,
    OneHome,
    ParallelStaging,
    Push,
    Staging,
)
from penstock.simulate.assumptions import PHYSICAL, Assumptions

_MAKERS: dict[str, Callable[[Assumptions], LoadingPolicy]] = {
    "lower-bound": lambda _: LowerBound(),
    "naive": lambda _: Naive(),
    "staging": lambda _: Staging(),
    "deepio": lambda _: DeepIO(),
    "deepio-opportunistic": lambda _: DeepIO(opportunistic=True),
    "parallel-staging": lambda assumed: ParallelStaging(assumed.late_copies),
    "lbann-dynamic": lambda assumed: LbannStore(keeps_as_read=assumed.time == "together"),
    "lbann-preloading": lambda _: LbannStore(preloading=True),
    "locality-aware": lambda assumed: LocalityAware(assumed.locality == "reordered"),
    "frequency": lambda assumed: _frequency(assumed),
    "frequency-unordered": lambda assumed: _frequency(assumed, in_order=False),
    "frequency-cleanup": lambda assumed: _frequency(assumed, cleanup_read=True),
    "hash-home": lambda _: OneHome("hash"),
    "cover": lambda _: OneHome("cover"),
    "cover+local": lambda _: OneHome("cover", reads_locally=True),
    "push": lambda _: Push(),
}
POLICY_NAMES = tuple(_MAKERS)


def policy_named(name: str, assumptions: Assumptions = PHYSICAL) -> LoadingPolicy:
    """Return a policy by its name in tables.

    Raises: ConfigError that lists the known ones.
    """
    if name not in _MAKERS:
        close = get_close_matches(name, POLICY_NAMES, n=1)
        meant = f"; {close[0]!r} is meant, perhaps" if close else ""
        raise ConfigError(f"policy {name!r} is not known{meant}. Known are {', '.join(POLICY_NAMES)}")
    return _MAKERS[name](assumptions)


def policy_of(policy: str | LoadingPolicy) -> LoadingPolicy:
    """Return the policy of a name, or an object that is one.

    Raises: ConfigError that lists the known names, or says what an object lacks.
    """
    if isinstance(policy, str):
        return policy_named(policy)
    if not is_policy(policy):
        raise ConfigError(
            f"policy is {policy!r}; it is a name, such as 'frequency', or an object with a name and prepare(job): see "
            "penstock.policy.loading.LoadingPolicy"
        )
    return policy


def is_policy(policy: object) -> bool:
    """Return whether an object, not its class, has what `LoadingPolicy` asks for."""
    has_name = isinstance(getattr(policy, "name", None), str)
    return not isinstance(policy, type) and has_name and callable(getattr(policy, "prepare", None))


def _frequency(assumed: Assumptions, *, in_order: bool = True, cleanup_read: bool = False) -> Frequency:
    return Frequency(
        in_order,
        cleanup_read=cleanup_read,
        stages_from_peers=assumed.remote_staging == "all",
        pieces=assumed.pieces,
        unread=assumed.unread,
    )
