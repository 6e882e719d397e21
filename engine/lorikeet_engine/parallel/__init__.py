"""Tensor parallelism: several processes, with a GPU each, compute a replica's layers together.

`shard` says which part of every linear, and of adapters of it, a process keeps; `rank_group` is
what the processes say to one another in a step. One of them, the leader, is the engine's process;
`followers` starts the others and passes on through a `ring` what they are to do.
"""
