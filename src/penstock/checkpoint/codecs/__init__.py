"""How the bytes of a tensor are stored: each codec turns a block of values into fewer bytes, and back bit for bit."""
