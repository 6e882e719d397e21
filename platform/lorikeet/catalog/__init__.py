"""The catalog: adapters, versions, aliases, tenants, API keys and pins, kept in an object store.

Reading is view.py alone: a `CatalogReader` holds the newest `CatalogState` (state.py), which is
immutable and answers all questions, and asks the log for what is new. `AdapterCatalog` (catalog.py,
on tenants_and_keys.py and writer.py) adds every operation that changes something. One refreshes
the state, asks rules/ which changes it means, and appends them to log/ as one entry: the only
commit point. log/apply.py turns entries into the next `CatalogState`. snapshots/ spares readers the
whole log, and lets them read only the partitions that a question needs. history.py answers about
the past, uploads.py takes blobs in, garbage_collection.py deletes what nothing needs. store/ is a
folder or S3.

The gateway serves from it and its admin API changes it; the controller reads pins from it.
"""
