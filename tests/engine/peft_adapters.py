"""Adapters made with PEFT, their blobs, and a source that engines fetch the blobs from."""

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import write_blob

_STORED_AS_ONE = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
# Where MLPs are experts, whose linears are no modules, those of attention take their place.
_BESIDE_EXPERTS = {"gate_proj": "q_proj", "up_proj": "v_proj", "down_proj": "o_proj"}


def save_adapter(checkpoint: Path, folder: Path, seed: int = 0, **lora: Any) -> Path:
    """Save a PEFT folder of a random adapter that changes the answers of a checkpoint's model.

    lora: LoraConfig's arguments; names of linears that the model stores as one become its name.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        lora = _named_as_in(base, lora)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.data.normal_(0.0, 0.1)
            if "trainable_tokens_delta" in name:
                weight.data += torch.randn_like(weight) * weight.std()
    model.save_pretrained(folder)
    return folder


def _named_as_in(model: Any, lora: dict[str, Any]) -> dict[str, Any]:
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    renames = _BESIDE_EXPERTS if "experts" in known else _STORED_AS_ONE
    renamed = {part: one for part, one in renames.items() if part not in known}

    def name(key: str) -> str:
        return renamed.get(key, key)

    named = dict(lora)
    if isinstance(lora.get("target_modules"), list):
        named["target_modules"] = sorted({name(target) for target in lora["target_modules"]})
    for pattern in {"rank_pattern", "alpha_pattern"} & set(lora):
        named[pattern] = {
            key if "experts." in key else re.sub(r"\w+$", lambda last: name(last[0]), key): value
            for key, value in lora[pattern].items()
        }
    return named


class BlobShelf:
    """AdapterSource over a folder of blobs.

    Fetches of an adapter block between `hold` and `release`; digests in `broken` raise OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.broken: set[str] = set()
        self._held: dict[str, threading.Event] = {}

    def add(self, peft_folder: Path, name: str, tenant: str = "acme") -> AdapterRef:
        """Write the blob of a PEFT folder to this source."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{name}.tmp"
        digest = write_blob(peft_folder, temporary)
        temporary.rename(self.folder / digest)
        return AdapterRef(tenant, name, 1, digest)

    def hold(self, ref: AdapterRef) -> None:
        """Block fetches of an adapter."""
        self._held[ref.digest] = threading.Event()

    def release(self, ref: AdapterRef) -> None:
        """Let the fetches of an adapter continue."""
        self._held.pop(ref.digest).set()

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        """Copy the blob to path."""
        self.fetched.append(ref.digest)
        if ref.digest in self._held:
            assert self._held[ref.digest].wait(60)
        if ref.digest in self.broken:
            raise OSError("the connection was reset")
        shutil.copyfile(self.folder / ref.digest, path)
