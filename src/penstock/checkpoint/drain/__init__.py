"""Snapshots on the fast tier are copied to the slow one while training goes on."""
