"""Writes TFRecord files: examples by protobuf's own encoder, frames by the format's few lines."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

from penstock.store.examples import NUMBERS, WINDOW_END, masked_crc32c

Feature = bytes | list[bytes] | list[int] | list[float]


@cache
def example_class() -> Any:
    """Return `tf.train.Example`. Source: TensorFlow, `tensorflow/core/example/example.proto` and `feature.proto`."""
    file: Any = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )
    kinds = {"BytesList": 12, "FloatList": 2, "Int64List": 3}  # TYPE_BYTES, TYPE_FLOAT, TYPE_INT64
    for name, kind in kinds.items():
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=3)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(kinds, 1):
        one = {"type": 11, "label": 1, "type_name": f".tensorflow.{name}", "oneof_index": 0}
        feature.field.add(name=name.lower(), number=number, **one)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, label=1, type_name=".tensorflow.Feature")
    features.field.add(
        name="feature", number=1, type=11, label=3, type_name=".tensorflow.Features.FeatureEntry"
    )
    file.message_type.add(name="Example").field.add(
        name="features", number=1, type=11, label=1, type_name=".tensorflow.Features"
    )
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def example(features: Mapping[str, Feature]) -> bytes:
    message = example_class()()
    for name, value in features.items():
        feature = message.features.feature[name]
        values = [value] if isinstance(value, bytes) else value
        kind: Any = feature.byteslist
        if values and isinstance(values[0], float):
            kind = feature.floatlist
        elif values and isinstance(values[0], int):
            kind = feature.int64list
        kind.SetInParent()
        kind.value.extend(values)
    return bytes(message.SerializeToString())


def masked(content: bytes) -> int:
    at = [0] * NUMBERS
    at[WINDOW_END] = len(content)
    return masked_crc32c(content, at, 0, len(content))


def frame(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked(length)) + content + bytes(4)


def write_records(file: Path, records: Iterable[Mapping[str, Feature] | bytes]) -> Path:
    """Write examples, or contents of frames, to a file; checksums of contents, which are not looked at, are zeros."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(frame(each if isinstance(each, bytes) else example(each)) for each in records))
    return file
