"""Commands that look at a service: status, why, settings, doctor."""
