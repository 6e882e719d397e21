"""Snapshots of the catalog's state, so that a process need not replay the whole log at its start.

snapshots.py writes and reads them: a manifest that names 257 partitions by their digests, every
256 entries, made by the controller. Which partition holds what is said in ../state.py;
partition_format.py is the rows of its bytes. A partition is read when somebody asks for what is in
it.
"""
