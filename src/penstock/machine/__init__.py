"""What each byte costs here: storage classes and links as measured curves."""

from penstock.machine.curve import Curve
from penstock.machine.machine import Machine
from penstock.machine.places import DISK_NAMES, Rate, SharedStore, StorageClass

__all__ = ["DISK_NAMES", "Curve", "Machine", "Rate", "SharedStore", "StorageClass"]
