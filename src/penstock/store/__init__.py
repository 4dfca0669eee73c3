"""Where bytes live: sources, which hold the whole data set, and tiers, which keep some of it near."""

from penstock.store.arrays import Arrays, Records, Tokens
from penstock.store.arrow import ArrowFiles
from penstock.store.catalog import Catalog
from penstock.store.coco import CocoImages
from penstock.store.decoded import DecodedFiles, DecodedUnits
from penstock.store.files import FileSource
from penstock.store.folder import FileList, FlatFolder, ImageFolder, open_source
from penstock.store.group import prepare_group, read_group
from penstock.store.hdf5 import Hdf5
from penstock.store.imagenet import ImageNetVal, read_class_names
from penstock.store.json_lines import JsonLines
from penstock.store.labels import Labels, labels_of
from penstock.store.litdata import LitDataChunks
from penstock.store.manifest import Manifest
from penstock.store.memory import MemoryTier
from penstock.store.mixing import MixedSource
from penstock.store.mosaic import MosaicShards
from penstock.store.packed import PackedFiles
from penstock.store.pairs import ImagesAndMasks
from penstock.store.parquet import ParquetFiles
from penstock.store.ranged import RangedSource, extents_of, read_all_merged, read_merged
from penstock.store.selection import Selectable, Selection
from penstock.store.shards import TarShards
from penstock.store.source import FileBacked, Numbers, Numeric, Source
from penstock.store.table import ArrowTable
from penstock.store.tfrecords import TFRecords
from penstock.store.tier import SizedTier

__all__ = [
    "Arrays",
    "ArrowFiles",
    "ArrowTable",
    "Catalog",
    "CocoImages",
    "DecodedFiles",
    "DecodedUnits",
    "FileBacked",
    "FileList",
    "FileSource",
    "FlatFolder",
    "Hdf5",
    "ImageFolder",
    "ImageNetVal",
    "ImagesAndMasks",
    "JsonLines",
    "Labels",
    "LitDataChunks",
    "Manifest",
    "MemoryTier",
    "MixedSource",
    "MosaicShards",
    "Numbers",
    "Numeric",
    "PackedFiles",
    "ParquetFiles",
    "RangedSource",
    "Records",
    "Selectable",
    "Selection",
    "SizedTier",
    "Source",
    "TFRecords",
    "TarShards",
    "Tokens",
    "extents_of",
    "labels_of",
    "open_source",
    "prepare_group",
    "read_all_merged",
    "read_class_names",
    "read_group",
    "read_merged",
]
