"""Device memory (`memory`) and copies that do not wait for the device (`async_copies`)."""
