"""Tools around graphs: placement, drawings, import of modules, lossy values, event files."""
