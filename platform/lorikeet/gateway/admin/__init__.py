"""The admin API: adapters, pins, tenants, keys, status."""
