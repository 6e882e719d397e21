"""Adapters of two base models behind one gateway."""

from pathlib import Path

from tests.gateway.conftest import WIDER, Gateway, chat, make_blob


def test_each_adapter_finds_its_base_model_and_goes_to_its_replicas(
    gateway: Gateway, tmp_path: Path
) -> None:
    config = {"base_model_name_or_path": "org/Wider-2B"}
    made = make_blob(tmp_path / "peft", config=config, width=WIDER.hidden)
    assert gateway.upload("acme/wide", made).json()["base_model"] == "wider"
    for model, base in (("acme/support", "tiny"), ("acme/wide", "wider"), ("acme/support", "tiny")):
        assert gateway.post("/v1/chat/completions", chat(model)).is_success
        base_model, call = gateway.engines.calls[-1]
        assert base_model == base
        assert call.adapter is not None
        assert f"{call.adapter.tenant}/{call.adapter.name}" == model
    parents = {model.id: model.parent for model in gateway.openai().models.list()}
    assert parents == {"tiny": None, "wider": None, "acme/support": "tiny", "acme/wide": "wider"}
