"""Transforms of samples, fused: from a file's bytes to the sample's place in the batch in one pass.

    pipeline = compile_pipeline([RandomResizedCrop(224), RandomHorizontalFlip(), ToTensor()], seed=0)
    draws = pipeline.draw(epoch, samples)          # once per batch
    pipeline.run(data, slot[i], draws, i, scratch)  # once per sample, on any thread

Importing this brings in neither numba nor OpenCV; `compile_pipeline` does.
"""

from penstock.loader.transforms.augment import (
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Pad,
    RandAugment,
    RandomApply,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    TrivialAugmentWide,
)
from penstock.loader.transforms.draws import Draws
from penstock.loader.transforms.joint import Joint
from penstock.loader.transforms.mixing import CutMix, MixUp
from penstock.loader.transforms.pipeline import Pipeline, Transform, compile_pipeline
from penstock.loader.transforms.stages import Scratch
from penstock.loader.transforms.steps import (
    CenterCrop,
    DecodeRaw,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
)

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "DecodeRaw",
    "Draws",
    "GaussianBlur",
    "Grayscale",
    "Joint",
    "MixUp",
    "Normalize",
    "Pad",
    "Pipeline",
    "RandAugment",
    "RandomApply",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "Scratch",
    "ToTensor",
    "Transform",
    "TrivialAugmentWide",
    "compile_pipeline",
]
