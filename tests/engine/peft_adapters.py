"""Adapters made with PEFT, their blobs, and the source an engine fetches them from."""

import shutil
import threading
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import write_blob


def save_adapter(checkpoint: Path, folder: Path, seed: int = 0, **lora: Any) -> Path:
    """A PEFT folder of a random adapter that changes what the checkpoint's model says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.data.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


class BlobShelf:
    """An AdapterSource over a folder of blobs.

    Digests in `held` are not handed out before `release`; those in `broken` raise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.broken: set[str] = set()
        self._held: dict[str, threading.Event] = {}

    def add(self, peft_folder: Path, name: str, tenant: str = "acme") -> AdapterRef:
        """Write the folder's blob here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f"{name}.tmp"
        digest = write_blob(peft_folder, temporary)
        temporary.rename(self.folder / digest)
        return AdapterRef(tenant, name, 1, digest)

    def hold(self, ref: AdapterRef) -> None:
        """Let fetches of an adapter hang."""
        self._held[ref.digest] = threading.Event()

    def release(self, ref: AdapterRef) -> None:
        """Let them go on."""
        self._held.pop(ref.digest).set()

    def fetch(self, ref: AdapterRef, path: Path) -> None:
        """Copy the blob to path."""
        self.fetched.append(ref.digest)
        if ref.digest in self._held:
            assert self._held[ref.digest].wait(60)
        if ref.digest in self.broken:
            raise OSError("the connection was reset")
        shutil.copyfile(self.folder / ref.digest, path)
