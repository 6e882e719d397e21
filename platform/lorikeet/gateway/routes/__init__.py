"""Routes beside generation: models, usage, metrics, request_log."""
