"""How a graph runs: what a run needs, lowered to primitives, merged, compiled to regions, executed."""
