"""The GPU tier: one arena of packed images, who uses them, and the copies that fill it."""
