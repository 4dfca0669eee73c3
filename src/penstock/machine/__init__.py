"""What each byte costs here: storage classes and links as measured curves."""

from penstock.machine.curve import Curve
from penstock.machine.machine import Cluster, Machine
from penstock.machine.places import DISK_NAMES, Device, DeviceLink, Rate, SharedStore, StorageClass

__all__ = [
    "DISK_NAMES",
    "Cluster",
    "Curve",
    "Device",
    "DeviceLink",
    "Machine",
    "Rate",
    "SharedStore",
    "StorageClass",
]
