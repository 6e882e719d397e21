"""The append-only log, of which each entry is one commit.

changes.py defines what an entry can change, log.py appends and reads entries, log_format.py is
their JSON in the store; apply.py turns entries into the next state, apply_to_adapter.py the part
of that which is about one adapter. `CatalogWriter` appends, `CatalogReader` follows.
"""
