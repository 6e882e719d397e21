"""What tenants used: counted by replicas, kept in the catalog's store, read by gateways.

ledger.py has the numbers, the accounts that they belong to and the ledger that a replica adds to;
writer.py writes that into the store every few seconds, in objects as object_format.py names them.
compaction.py, run by the controller and `lorikeet gc`, joins a day's objects into one.
day_reader.py reads one day as it grows, reader.py a period, summary.py groups it into rows for
`lorikeet usage` and GET /v1/usage, and month_tokens.py sums a month for the tenants' budgets.
"""
