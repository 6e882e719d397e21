"""Adapters on experts of mixture-of-experts models: names, and the forms that trainers save."""
