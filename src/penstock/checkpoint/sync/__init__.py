"""Weights on the wire: the tensors of one snapshot become those of another."""
