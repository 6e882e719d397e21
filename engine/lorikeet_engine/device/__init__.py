"""The device itself: how much memory it has free, and copies that nobody waits for."""
