"""Rules of each catalog operation: pure functions of the state.

Each function returns the changes to commit together, or no changes if the state is as wanted
already. It raises the error that refuses the operation. adapters.py: versions, aliases, retirement;
restore.py: undoing a retirement; pins.py; tenants_and_keys.py. limits.py checks options of tenants
and keys, quota.py a tenant's adapters and bytes, pin_budget.py a tenant's pinned bytes.
`AdapterCatalog` calls them.
"""
