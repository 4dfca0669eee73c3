"""Copies snapshots from the fast tier to the slow one during the training."""
