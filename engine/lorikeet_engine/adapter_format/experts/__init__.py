"""Adapters on the experts of mixture-of-experts models: how they are named, and in which forms."""
