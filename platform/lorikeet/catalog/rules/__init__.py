"""Rules of each catalog operation: pure functions of the state, which `AdapterCatalog` calls.

A function for an operation returns the changes to commit together, or no changes if the state is as
wanted already. It raises the error that refuses the operation.

adapters.py          versions, aliases, shares and retirement
restore.py           undoing a retirement
pins.py              setting and removing pins
tenants_and_keys.py  creating and changing tenants and keys
limits.py            checks of the options of tenants and keys
quota.py             check of the number and bytes of a tenant's adapters
pin_budget.py        check of a tenant's pinned bytes
"""
