"""The operations: what each takes and gives, and its kernels."""
