"""Where snapshots lie: folders and object stores, and one writer for each."""
