"""The GPU tier: one arena of packed images, the adapters in it, and the copies that fill it.

`adapters` decides which adapters are there: `adapter` is one of them and its leases. `slots`
chooses in numbers where images lie, `arena` holds the memory and moves and copies them,
`transfers` waits for copies under way, and `slot_usage` counts which tenants used which slots.
"""
