"""Adapters on the experts of mixture-of-experts models: their names and forms."""
