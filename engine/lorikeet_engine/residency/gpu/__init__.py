"""The GPU tier: one arena of packed images, the adapters in it, and the copies that fill it.

`adapters` decides which adapters are on the GPU, and leases them; `slot_usage` measures for how
long each tenant leases them. `slots` computes where images lie, `arena` holds the memory, moves
images and starts copies, and `image_copies` limits the rate of copies and waits for them.
`compositions` leases several adapters at once. `rank_arenas` repeats the arena's operations on all
GPUs of a tensor parallel replica.
"""
