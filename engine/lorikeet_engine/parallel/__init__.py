"""Tensor parallelism: several processes, with a GPU each, compute a replica's layers together.

`shard`: part of every linear, and of its LoRA weights, that each process keeps.
`rank_group`: collective communication of the processes; `sums`: their all-reduces.
`followers`: all processes but the leader, which is the engine's own process.
`ring`: shared memory through which the leader sends commands to the followers.
"""
