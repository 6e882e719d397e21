"""The GPU tier: one arena of packed images, the adapters in it, and the copies that fill it.

`adapters` decides which adapters are there and leases them (`leases`, which also counts who used
them). `slots` chooses in numbers where images lie, `arena` holds the memory and moves and copies
them, and `transfers` waits for copies under way.
"""
