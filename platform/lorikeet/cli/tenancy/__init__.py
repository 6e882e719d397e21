"""Commands about tenants, their API keys and their usage, a file each.

limit_options.py gives `tenants create`, `tenants limit`, `keys create` and `keys limit` their
options for limits.
"""
