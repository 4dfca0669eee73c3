"""What a user of PyTorch imports: the loader, and orders as samplers for PyTorch's own."""

from penstock.torch.loader import Loader

__all__ = ["Loader"]
