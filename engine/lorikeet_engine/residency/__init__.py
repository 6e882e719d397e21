"""Where adapters' weights are: remote, on disk, on the host, on the GPU, and how they move.

Importing this loads no torch, so that a simulator can have `eviction` alone.
"""
