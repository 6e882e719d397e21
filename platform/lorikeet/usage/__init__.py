"""Usage of tenants: counted by replicas and gateways, stored in the catalog's store.

ledger.py defines counts, accounts and the ledger that a process adds to. writer.py writes the
ledger to the store every few seconds, in the objects of object_format.py. compaction.py, run by the
controller and `lorikeet gc`, merges a day's objects into one. day_reader.py reads one day as it
grows, reader.py a period; summary.py groups a period into rows for `lorikeet usage` and GET
/v1/usage. month_usage.py sums the present month for the tenants' budgets.
"""
