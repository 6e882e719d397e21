"""A source's path through `lorikeet register` and the gateway, up to an accepted blob."""

from pathlib import Path

from lorikeet.cli.adapters.sources import open_source
from lorikeet.errors import LorikeetError
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet_engine.adapter_format import AdapterLimits, write_blob
from lorikeet_engine.errors import AdapterError
from tests.corpus.draft import Draft

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 24)
Refusal = (LorikeetError, AdapterError)
"""Errors that users see as one line; any other exception is a fault of the product."""


def register(draft: Draft) -> Path:
    """Return the blob made of the draft's source; raise the error that register would print."""
    blob, converted = draft.scratch / "blob", draft.scratch / "converted"
    if draft.convert is not None:
        draft.convert(converted)
        draft.source = converted
    with open_source(str(draft.source)) as folder:
        write_blob(folder, blob)
    validate_blob(blob, draft.base.served, LIMITS, draft.base_model)
    return blob
