"""What each operation of the catalog changes and refuses, given the state: pure functions.

Each returns the changes to commit together; none when the state already is as wanted.
adapters.py: versions, aliases, retirement; restore.py: undoing it; pins.py; tenants_and_keys.py.
limits.py checks limits and other options of tenants and keys; quota.py how many adapters and bytes
a tenant may have, pin_budget.py how much it may pin. The operations of `AdapterCatalog` call them.
"""
