"""The files of one snapshot: the manifest and the parts, written and read."""
