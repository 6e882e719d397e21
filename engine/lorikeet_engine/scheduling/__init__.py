"""Who computes what in a step: waiting requests, turns of tenants, deadlines, KV pages."""
