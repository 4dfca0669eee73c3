"""Other people's checkpoints: read, written and sealed."""
