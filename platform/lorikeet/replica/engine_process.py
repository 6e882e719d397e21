"""Construction of the engine inside its own process, the only process that loads torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.errors import ObjectNotFound
from lorikeet.logs import log_to_stderr
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import AdapterMissing

if TYPE_CHECKING:
    from lorikeet_engine.engine import Engine


def build_engine(settings: Settings, base_model: str) -> "Engine":
    """Build the engine of one base model with adapters from the catalog; make this process log to
    stderr.

    Raises LorikeetError if a setting or the catalog's store is at fault, EngineError if the engine
    cannot start.
    """
    # Imported here: the replica's process imports this module too, and must not load torch.
    from lorikeet.replica.engine_settings import engine_settings
    from lorikeet.replica.grammar_matcher import ModelGrammars
    from lorikeet_engine.engine import Engine

    log_to_stderr()
    source = CatalogAdapterSource(open_store(settings.catalog))
    grammars = ModelGrammars(settings.base_models[base_model])
    return Engine(engine_settings(settings, base_model), source, grammars=grammars)


class CatalogAdapterSource:
    """AdapterSource of the engine: downloads adapters' blobs by digest from the catalog's store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def fetch(self, ref: AdapterRef, path: Path) -> str:
        """Download an adapter's blob to `path`; return its SHA-256.

        Raises AdapterMissing if the store does not have the blob, StoreError if the store fails.
        """
        try:
            return self._store.download(blob_key(ref.digest), path)
        except ObjectNotFound as error:
            raise AdapterMissing(
                f"the store has no weights with digest {ref.digest} any more: push or register the "
                "adapter again, or have your admin restore the store"
            ) from error
