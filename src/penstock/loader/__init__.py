"""A plan of reads, run for a training loop: the loader, its memory and its transforms."""

from penstock.loader.budget import MemoryBudget
from penstock.loader.config import LoaderArguments, LoaderConfig
from penstock.loader.documents import PackedDocuments, cu_seqlens
from penstock.loader.failed_samples import SkippedSample
from penstock.loader.front_end import NUMPY, FrontEnd
from penstock.loader.loader import Loader
from penstock.loader.mixture import MixedDataset, mix
from penstock.loader.prediction import predict
from penstock.loader.source_samples import SourceSamples, mapped
from penstock.loader.tar_samples import TarSamples
from penstock.loader.unequal import Padded, Padding, Ragged
from penstock.plan.mixing import LinearWeights
from penstock.report import print_report

__all__ = [
    "NUMPY",
    "FrontEnd",
    "LinearWeights",
    "Loader",
    "LoaderArguments",
    "LoaderConfig",
    "MemoryBudget",
    "MixedDataset",
    "PackedDocuments",
    "Padded",
    "Padding",
    "Ragged",
    "SkippedSample",
    "SourceSamples",
    "TarSamples",
    "cu_seqlens",
    "mapped",
    "mix",
    "predict",
    "print_report",
]
