"""Loading policies by name, one's own included: ``module:Class``, a small class in a file of one's own."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.policy.loading import Job, Loading, LoadingPolicy, NotSupported
from penstock.simulate.policies import is_policy, policy_named, policy_of


def find_policy(name: str) -> LoadingPolicy:
    """Return a policy of the package, or an instance of a class of one's own.

    name: as in tables; or ``module:Class``, of a module on Python's path or in the current folder, whose class can be
        made without arguments and has what `penstock.policy.loading.LoadingPolicy` asks for.

    Raises: ConfigError naming the name, and listing the known ones where it is none of one's own.
    """
    module_name, is_own, class_name = name.partition(":")
    if not is_own:
        return policy_named(name)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        kind = getattr(importlib.import_module(module_name), class_name, None)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"policy {name!r}: {error}; it is module:Class, of a module that Python finds here or on its path"
        ) from error
    except Exception as error:  # of the module's own code
        raise ConfigError(f"policy {name!r}: {module_name} raised {type(error).__name__}: {error}") from error
    if not isinstance(kind, type):
        raise ConfigError(f"policy {name!r}: {module_name} has no class {class_name}")
    try:
        policy = kind()
    except TypeError as error:
        raise ConfigError(f"policy {name!r} is made without arguments: {error}") from error
    if not is_policy(policy):
        raise ConfigError(
            f"policy {name!r} lacks a name (text) or a prepare(job): see penstock.policy.loading.LoadingPolicy"
        )
    return policy_of(policy)


def with_errors_in_one_line(policy: LoadingPolicy) -> LoadingPolicy:
    """Return a policy; if it is a user's own, its errors are ConfigErrors that name file and line."""
    return policy if type(policy).__module__.startswith("penstock.") else _Own(policy)


@dataclass(frozen=True, slots=True)
class _Own:
    """A user's own policy. What it raises becomes a ConfigError of one line, as for a bad file."""

    policy: LoadingPolicy

    @property
    def name(self) -> str:
        return self.policy.name

    def prepare(self, job: Job) -> Loading:
        try:
            return self.policy.prepare(job)
        except NotSupported:
            raise
        except Exception as error:
            raise _raised(self.policy, error) from error


def _raised(policy: LoadingPolicy, error: Exception) -> ConfigError:
    """Return the error that says where the policy's own code raised."""
    frames = traceback.extract_tb(error.__traceback__)
    # Rather the policy's own line than one within a library that it called.
    own = getattr(sys.modules.get(type(policy).__module__), "__file__", None)
    at = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return ConfigError(
        f"policy {policy.name!r}: {at.filename}, line {at.lineno}: {type(error).__name__}: {error}"
    )
