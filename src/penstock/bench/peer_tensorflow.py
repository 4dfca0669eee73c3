"""TensorFlow's tf.data over the files of a source: the pipeline of Chien et al. 2018, section III.A."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # or it reports the end of each pass

import tensorflow as tf

from penstock.bench.loaders import SIDE, Pass, RunPass, Setting, Work, checked
from penstock.errors import ConfigError
from penstock.store import FileBacked
from penstock.store.remote import objects_in


@contextmanager
def open_loader(setting: Setting) -> Iterator[RunPass]:
    """Yield passes of a pipeline: files mapped by so many calls at once, then batched.

    Raises: ConfigError for a source whose samples are not files of this host.
    """
    source = setting.source
    if not isinstance(source, FileBacked) or objects_in(source) is not None:
        raise ConfigError("tf.data reads files alone here, and these samples are none of this host")
    files = source  # narrowed, for the function below

    def run(ids: Sequence[int]) -> Pass:
        paths = tf.data.Dataset.from_tensor_slices([files.path_of(sample) for sample in ids])
        made = paths.map(_MADE[setting.work], num_parallel_calls=setting.threads)
        if setting.on_error == "skip":
            made = made.ignore_errors()
        begin = time.perf_counter()
        loaded = sum(int(batch.shape[0]) for batch in made.batch(setting.batch_size))
        return checked(ids, time.perf_counter() - begin, len(ids) - loaded)

    yield run


def _length(path: Any) -> Any:
    return tf.strings.length(tf.io.read_file(path))


def _image(path: Any) -> Any:
    image = tf.image.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
    return tf.image.resize(tf.image.convert_image_dtype(image, tf.float32), (SIDE, SIDE))


_MADE = {Work.READ: _length, Work.DECODE: _image}
