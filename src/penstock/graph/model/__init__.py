"""What a graph is: values and their types, nodes, the checks that let a node in."""
