"""The loading policies by name."""

from __future__ import annotations

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

_POLICIES: dict[str, LoadingPolicy] = {
    policy.name: policy
    for policy in (
        LowerBound(),
        Naive(),
        Staging(),
        DeepIO(),
        DeepIO(opportunistic=True),
        ParallelStaging(),
        LbannStore(),
        LbannStore(preloading=True),
        LocalityAware(),
        Frequency(),
        Frequency(in_order=False),
        Frequency(cleanup_read=True),
        Frequency(is_alone=True),
        OneHome("hash"),
        OneHome("cover"),
        OneHome("cover", reads_locally=True),
        OneHome("first-reader"),
        Push(),
    )
}
POLICY_NAMES = tuple(_POLICIES)


def policy_named(name: str) -> LoadingPolicy:
    """Return a policy by its name in tables.

    Raises: ConfigError that lists the known ones.
    """
    if name not in _POLICIES:
        close = get_close_matches(name, POLICY_NAMES, n=1)
        meant = f"; {close[0]!r} is meant, perhaps" if close else ""
        raise ConfigError(f"policy {name!r} is not known{meant}. Known are {', '.join(POLICY_NAMES)}")
    return _POLICIES[name]


def policy_of(policy: str | LoadingPolicy) -> LoadingPolicy:
    """Return the policy of a name, or an object that is one.

    Raises: ConfigError that lists the known names, or says what an object lacks.
    """
    if isinstance(policy, str):
        return policy_named(policy)
    if not is_policy(policy):
        what = (
            f"the class {policy.__name__}: give an object of it"
            if isinstance(policy, type)
            else f"{policy!r}"
        )
        raise ConfigError(
            f"policy is {what}; it is a name, such as 'frequency', or an object with a name and prepare(job): see "
            "penstock.policy.loading.LoadingPolicy"
        )
    if policy.name in POLICY_NAMES and policy != _POLICIES[policy.name]:
        raise ConfigError(
            f"policy {policy!r} has the name of another, {policy.name!r}: give it one of its own, by which traces and "
            "tables tell it apart"
        )
    return policy


def is_policy(policy: object) -> bool:
    """Return whether an object, not its class, has what `LoadingPolicy` asks for."""
    has_name = isinstance(getattr(policy, "name", None), str)
    return not isinstance(policy, type) and has_name and callable(getattr(policy, "prepare", None))
