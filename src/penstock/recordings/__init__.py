"""What programs read and wrote, block by block: recordings, their importers, and access sequences."""
