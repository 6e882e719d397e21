"""Random models and adapters are complete enough for the product, and adapters are distinct."""

import pytest
from tokenizers import Tokenizer

from loadtest.real_service.adapters import TENANT, AdapterWeights, fill_catalog, image_bytes
from loadtest.real_service.random_models import END, TINY, write_model
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.settings import Settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"), "tiny", "cpu")


def test_all_tokens_but_the_end_have_distinct_texts(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY["vocab_size"]
    words = [tokenizer.decode([token]) for token in range(256, TINY["vocab_size"] - 1)]
    assert len(set(words)) == len(words)
    assert all(words)
    assert tokenizer.token_to_id(END) == TINY["vocab_size"] - 1
    assert tokenizer.decode(tokenizer.encode("café at 9").ids) == "café at 9"


def test_the_catalog_has_an_adapter_of_each_rank_and_no_two_alike(model, tmp_path):
    settings = Settings(
        catalog=str(tmp_path / "catalog"), base_models={"tiny": model}, device="cpu"
    )
    ranks, linears = [8, 16, 8, 16], ["q_proj", "v_proj"]
    stock = fill_catalog(settings, ranks, AdapterWeights(linears))
    catalog = CatalogReader(open_store(settings.catalog))
    catalog.refresh()
    kept = [catalog.ask(lambda state, n=n: state.adapter(TENANT, f"a{n}")) for n in range(4)]
    assert [record.versions[0].max_rank for record in kept] == ranks
    assert [record.versions[0].digest for record in kept] == [ref.digest for ref in stock.refs]
    assert len({ref.digest for ref in stock.refs}) == 4
    assert kept[1].versions[0].gpu_bytes == image_bytes("tiny", 16, "cpu", linears)
    assert catalog.store.size(f"blobs/{stock.refs[0].digest[:2]}/{stock.refs[0].digest}") > 0
