"""Commands about tenants, their API keys and their usage, a file each.

limit_options.py holds the options for limits of `tenants create`, `tenants limit`, `keys create`
and `keys limit`.
"""
