"""Source of adapters' blobs that engines fetch from, for folders that PEFT or others have saved."""

import shutil
import threading
from pathlib import Path

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.adapter_format.embedding_config import parse_embedder
from lorikeet_engine.adapter_format.header import read_header
from lorikeet_engine.adapter_format.lora_config import LoraConfig
from lorikeet_engine.adapter_format.score_head import parse_head
from lorikeet_engine.adapter_format.spec import METADATA_KEY


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
        blob = self.folder / digest
        metadata = read_header(blob).metadata
        known = parse_head(metadata), parse_embedder(metadata)
        return AdapterRef(tenant, name, 1, digest, invocation_tokens(blob), *known)

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


def invocation_tokens(blob: Path) -> tuple[int, ...]:
    """Return the invocation tokens of a blob's adapter; () for other than activated LoRA."""
    config = LoraConfig.from_json(read_header(blob).metadata[METADATA_KEY])
    return tuple(config.alora_invocation_tokens)
