"""What a user of PyTorch imports: the loader, the drop-in DataLoader, and orders as samplers for PyTorch's own."""

from penstock.torch.dataloader import DataLoader
from penstock.torch.loader import Loader, to_nested
from penstock.torch.sampler import BundleRandomSampler, OrderSampler

__all__ = ["BundleRandomSampler", "DataLoader", "Loader", "OrderSampler", "to_nested"]
