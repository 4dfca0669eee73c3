"""The batches of a loader as a data set of TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.front_end import with_images
from penstock.loader.unequal import Padded, Ragged


def as_dataset(loader: Loader) -> Any:
    """Return a `tf.data.Dataset` whose elements are a loader's batches, for Keras' `fit` and for loops.

    Each iteration over it is the loader's next epoch: give the loader as many `epochs=` as are run. It is finite; the
    loader has shuffled, transformed and prefetched already, so that no `shuffle`, `map` or `prefetch` need follow.
    What follows may take batches ahead: a state to resume from is `loader.state_at(epoch, step)` of the training's
    own count.

    loader: of NumPy arrays, `penstock.Loader`; the caller closes it. Batches of tuples and dicts stay that, those of
        lists become tuples. Text becomes tf.string.
    Raises: ConfigError if it gives no NumPy arrays, or what no tensor can hold.
    """

    def as_tensorflow_takes_it(batch: Any) -> Any:
        if loader.dtype == "bfloat16":
            batch = with_images(batch, lambda images: images.view(tf.bfloat16.as_numpy_dtype))
        return _nested(batch)

    def batches() -> Any:
        for batch in loader:
            yield as_tensorflow_takes_it(batch)

    signature = _signature(as_tensorflow_takes_it(loader.empty_batch()))

    found = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return found.apply(tf.data.experimental.assert_cardinality(len(loader)))


def _is_text(part: list[Any]) -> bool:
    """Whether a list is of the texts of a batch; it is of parts if not."""
    return all(isinstance(each, str | bytes) for each in part)


def _nested(batch: Any) -> Any:
    """Return a batch with tuples in the place of lists, which TensorFlow takes for tensors."""
    if isinstance(batch, dict):
        return {key: _nested(part) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_nested, batch))
    if isinstance(batch, tuple) or (isinstance(batch, list) and not _is_text(batch)):
        return tuple(map(_nested, batch))
    return batch


def _signature(batch: Any) -> Any:
    """Return the `tf.TensorSpec`s of batches like one without samples."""
    if isinstance(batch, dict):
        return {key: _signature(part) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_signature, batch))
    if isinstance(batch, list) and not batch:
        return tf.TensorSpec([None], tf.string)
    if isinstance(batch, tuple | list):
        return tuple(map(_signature, batch))
    if isinstance(batch, np.ndarray):
        # Dimensions of a padded field differ from batch to batch: they are 0 without samples.
        return tf.TensorSpec([None, *(size or None for size in batch.shape[1:])], batch.dtype)
    if isinstance(batch, Ragged | Padded):
        raise ConfigError(
            "batches have a ragged field, or a padded one with a mask, and a tf.data.Dataset of tensors is made: give "
            "padded= with a number"
        )
    raise ConfigError(
        f"the loader's batches have a {type(batch).__name__}, and TensorFlow takes NumPy arrays: make it with "
        "penstock.Loader"
    )
