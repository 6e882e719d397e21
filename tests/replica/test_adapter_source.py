"""Source from which an engine fetches adapters' blobs: the catalog's store."""

import pytest

from lorikeet.apis.answer import refusal_of
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import StoreError
from lorikeet.replica.engine_process import CatalogAdapterSource
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import AdapterMissing, LoadFault

REF = AdapterRef("acme", "support", 1, "d" * 64)


def test_a_blob_that_the_store_has_lost_is_its_adapters_own_fault(tmp_path):
    source = CatalogAdapterSource(LocalStore(tmp_path / "store"))
    with pytest.raises(AdapterMissing, match="register the adapter again") as caught:
        source.fetch(REF, tmp_path / "blob")
    assert refusal_of(caught.value).fault is LoadFault.ADAPTER
    assert str(tmp_path) not in caught.value.message


def test_a_store_that_fails_raises_its_own_error(tmp_path):
    class AwayStore:
        def download(self, _key, _path):
            raise StoreError("the bucket does not answer")

    with pytest.raises(StoreError):
        CatalogAdapterSource(AwayStore()).fetch(REF, tmp_path / "blob")
