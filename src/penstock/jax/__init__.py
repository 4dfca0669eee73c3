"""What a user of JAX imports: the loader."""

from penstock.jax.loader import Loader

__all__ = ["Loader"]
