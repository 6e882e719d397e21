"""Adapter tiers: remote store, disk, host memory and GPU, and the loads between them.

`tiers` is the engine's interface: it reports an adapter's tier, takes requests
(`requested_adapters`), pins (`pins`) and prefetches (`prefetches`), and leases adapters on the GPU.

A blob is an adapter's safetensors file; an image, the adapter packed for the GPU.

    remote ──▶ disk                `loader`: downloads a blob into `disk`
    disk   ──▶ host                `loader`: packs a blob (`blob_packing`) into an image
                                   (`packed_image`) in `host_arena`, or reads an image file
    host   ──▶ GPU                 `gpu`: copies the image into the device's arena

Eviction is decided once for each tier:

    tier   decided by              evicted first                never evicted
    GPU    `gpu/adapters.py`       lowest `eviction_score`      leased, being copied, pinned, or
                                                                just requested (for GUARD_S)
    host   `host_arena.py`         least recently held image    held, pinned
    disk   `disk/cache.py`         least recently used file     pinned, by any process

On GPU and host, `reservations` limits the memory of pins, and revokes pins whose memory a request
needs.

`image_checks` finds images that memory has damaged, by their `checksums`. Importing this package
loads no torch, so that a simulator can import `eviction_score`.
"""
