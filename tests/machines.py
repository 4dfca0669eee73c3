"""Machines as users write them."""

#: A store that is slow, and no tier. Keys of the machine itself stand before it.
SLOW_STORE = """
[source]
read = "50 MB/s"
latency = "5 ms"
threads = 4
[[storage]]
name = "staging"
capacity = "1 GB"
threads = 1
read = "10 GB/s"
"""
