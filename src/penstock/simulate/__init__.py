"""Plans run on a modelled machine in virtual time."""

from penstock.simulate.loading import predict

__all__ = ["predict"]
