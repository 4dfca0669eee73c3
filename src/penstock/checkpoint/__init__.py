"""A plan of writes, run for a training: snapshots of its state, as differences where that is smaller, kept safely."""
