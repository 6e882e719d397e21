"""Pushing: trainers send versions of adapters with publish keys (docs/pushing.md)."""
