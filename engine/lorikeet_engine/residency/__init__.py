"""Where adapters' weights are, remote, on disk, on the host or on the GPU, and how they move.

`tiers` is the whole to the engine: it says where an adapter is, takes requests, pins and
prefetches (a module each), and leases what is on the GPU. `loader` downloads to `disk`, has
`blob_packing` make an image of the blob, by `staged_layers` and as `packing` lays it out, for
tensor parallelism `shard`'s part of it, and puts that into `host_arena`; `disk/incoming_blobs`
does, of one that another process is writing. `gpu` places and evicts by `eviction_score`.
`reservations` bounds what pins may take. `image_checks` finds images that memory has damaged, by
their `checksums`.
`stats` and `changes` report; `load_times` measures what loads cost.

Importing this loads no torch, so that a simulator can have `eviction_score` alone.
"""
