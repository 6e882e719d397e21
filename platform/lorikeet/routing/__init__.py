"""Where a request goes: pure functions."""
