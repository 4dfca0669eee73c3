"""NVIDIA DALI on the CPU: random-crop decode, triangular antialiased (or bilinear) resize, flip, normalise."""

from __future__ import annotations

from typing import Any

from nvidia.dali import fn, pipeline_def, types
from peer_protocol import BATCH, MEAN, SIZE, STD, arguments, serve


@pipeline_def  # type: ignore[untyped-decorator]
def crops(images: str, antialias: bool) -> Any:
    data, labels = fn.readers.file(file_root=images, random_shuffle=True, initial_fill=2048, name="files")
    picture = fn.decoders.image_random_crop(
        data, device="cpu", random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3)
    )
    resized = fn.resize(
        picture,
        resize_x=SIZE,
        resize_y=SIZE,
        interp_type=types.INTERP_TRIANGULAR if antialias else types.INTERP_LINEAR,
        antialias=antialias,
    )
    output = fn.crop_mirror_normalize(
        resized,
        dtype=types.FLOAT,
        output_layout="CHW",
        mirror=fn.random.coin_flip(),
        mean=[255 * mean for mean in MEAN],
        std=[255 * std for std in STD],
    )
    return output, labels


def main() -> None:
    options = arguments(threads=int, resampling=str)
    pipeline = crops(
        images=str(options.images),
        antialias=options.resampling == "antialias",
        batch_size=BATCH,
        num_threads=options.threads,
        device_id=None,
        prefetch_queue_depth=2,
    )
    pipeline.build()
    count = pipeline.epoch_size("files")

    def run_epoch() -> int:
        images = 0
        while images < count:
            output, _ = pipeline.run()
            images += len(output)
        return images

    serve(run_epoch)


if __name__ == "__main__":
    main()
