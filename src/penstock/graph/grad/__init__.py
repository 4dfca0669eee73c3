"""Gradients: nodes that are added to a graph, going backward from a result to what it depends on."""
