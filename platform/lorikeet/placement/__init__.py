"""Which adapters each replica keeps: pure functions."""
