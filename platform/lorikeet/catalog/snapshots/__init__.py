"""Snapshots of the catalog's state, in partitions that are read when they are asked for."""
