"""What a user of TensorFlow imports: a loader as a `tf.data.Dataset`."""

from penstock.tensorflow.dataset import as_dataset

__all__ = ["as_dataset"]
