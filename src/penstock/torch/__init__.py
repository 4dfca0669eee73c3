"""What a user of PyTorch imports: the loader, and orders as samplers for PyTorch's own."""

from penstock.torch.loader import Loader
from penstock.torch.sampler import BundleRandomSampler, OrderSampler

__all__ = ["BundleRandomSampler", "Loader", "OrderSampler"]
