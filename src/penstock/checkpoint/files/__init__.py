"""The files of snapshots: the manifest and the parts, written and read, and which snapshots there are."""
