"""Routes beside generation: models, usage, metrics, explanations."""
