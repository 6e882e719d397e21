"""The GPU tier: one arena of packed images, the adapters in it, and the copies that fill it.

`adapters` decides which adapters are on the GPU, and leases them; `slot_usage` counts the time of
leases by tenant. `slots` computes where images lie, `arena` holds the memory, moves images and
starts copies, and `image_copies` paces and awaits copies. `rank_arenas` repeats all of it on the
GPUs of a tensor parallel replica.
"""
