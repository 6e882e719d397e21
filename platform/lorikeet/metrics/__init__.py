"""What each process measures, and how Prometheus reads it; docs/metrics.md lists all of it."""
