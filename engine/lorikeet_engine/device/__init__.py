"""The device itself: memory finds how much is free, async_copies moves data without waiting.

Used by every part of the engine that holds tensors.
"""
