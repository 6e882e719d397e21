"""What PEFT answers under adapters on experts, whichever way trainers save them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engine.moe_adapters import save_numbered, save_shared, shared_deltas
from tests.engine.peft_world import PeftWorld

_RANK, _SHARED_RANK, _ALPHA = 3, 2, 8


class MoeWorld(PeftWorld):
    """With two adapters more: `numbered` has matrices of each expert, `shared` some for all."""

    def __init__(
        self, checkpoint: Path, folder: Path, adapters: Mapping[str, dict[str, Any]], tokens: int
    ) -> None:
        super().__init__(checkpoint, folder, adapters, tokens)
        config = json.loads((checkpoint / "config.json").read_text())
        is_old = config["model_type"] == "mixtral"
        save_numbered(checkpoint, folder / "numbered", _RANK, old_names=is_old)
        save_shared(checkpoint, folder / "shared", _SHARED_RANK)
        for name in ("numbered", "shared"):
            self.refs[name] = self.shelf.add(folder / name, name)
            self.prompts[name] = self.prompts[None]
            self.expected[name] = self.generated(self.model(name), self.prompts[name])
            assert self.expected[name] != self.expected[None]
        self.names = (*self.names, "numbered", "shared")

    def model(self, name: str | None) -> Any:
        """PEFT's model under an adapter; under `shared`, which PEFT has not, the merged one."""
        if name != "shared":
            return super().model(name)
        model = super().model(None)
        for path, delta in shared_deltas(self.folder / name, _ALPHA / _SHARED_RANK).items():
            experts, _, linear = path.removeprefix("base_model.model.").rpartition(".")
            parameter = "down_proj" if linear == "w2" else "gate_up_proj"
            weight = model.get_parameter(f"{experts}.{parameter}").data
            gate_and_up = weight.chunk(2, dim=1)
            {"w1": gate_and_up[0], "w2": weight, "w3": gate_and_up[1]}[linear].add_(delta)
        return model
