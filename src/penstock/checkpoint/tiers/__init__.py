"""Where snapshots lie: folders and object stores, one writer for each, and what is there."""
