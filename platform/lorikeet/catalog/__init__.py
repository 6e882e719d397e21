"""The catalog: adapters, versions, aliases, tenants, API keys and pins, kept in an object store.

Reading: `CatalogReader` (reader.py) holds the newest `CatalogState` (state.py), an immutable value
that answers every question, and asks the log for new entries. Questions about the past go through
history.py, which shows a `CatalogView` (view.py) as of one entry.

Changing: `AdapterCatalog` (catalog.py) holds a reader and every operation. An operation refreshes
the state, asks rules/ which changes to make, and appends the changes to the log (log.py) as one
entry: the only commit point. changes.py defines the changes, apply.py applies entries to a state.

snapshots.py spares readers the whole log, and lets them read only the partitions that a question
needs. resumable_uploads.py receives blobs, garbage_collection.py deletes what nothing needs. store/
is a folder or S3.
"""
