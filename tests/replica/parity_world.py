"""An engine in process and a trainer with PEFT, for parity proofs."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from lorikeet.parity.figures import Bounds, Parity
from lorikeet.parity.peft_probes import peft_probes
from lorikeet.parity.probes import Probes
from lorikeet.protocol.parity import ParityTest
from lorikeet.replica.parity import prove_parity
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.request import Request
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import Answers, build

DEFAULTS = Bounds()
_PROMPTS, _PROMPT_TOKENS, _TOKENS = 4, 6, 48


class ParityWorld:
    """Replica of one checkpoint; proofs of adapters in PEFT's folders on it."""

    def __init__(self, checkpoint: Path, folder: Path, **settings: Any) -> None:
        """Start the engine.

        settings: fields of EngineSettings.
        """
        self.shelf = BlobShelf(folder / "blobs")
        self.cache = folder / "cache"
        self.engine = build(checkpoint, self.shelf, self.cache, **settings)
        self._answers = Answers(self.engine)
        self.requests: list[Request] = []

    def prove(self, adapter: Path, probes: Probes, bounds: Bounds = DEFAULTS) -> Parity:
        """Register the adapter of a PEFT folder and prove its parity."""
        return self.prove_ref(self.shelf.add(adapter, "policy"), probes, bounds)

    def prove_ref(self, ref: AdapterRef, probes: Probes, bounds: Bounds = DEFAULTS) -> Parity:
        test = ParityTest(f"proof-{len(self.requests)}", ref, probes, bounds)
        at = self.cache, self.shelf.fetch
        forget = self.engine.forget
        proof = prove_parity(test, self.engine.info, *at, asyncio.Lock(), self._score, forget)
        return asyncio.run(proof)

    async def _score(self, request: Request) -> list[list[float]]:
        self.requests.append(request)
        self._answers.submit(request)
        self._answers.all()
        if request.request_id in self._answers.errors:
            raise self._answers.errors.pop(request.request_id)
        return [
            [each.logprob for each in self._answers.scores[request.request_id, choice]]
            for choice in range(len(request.prompts))
        ]


class Trainer:
    """PEFT's model of an adapter, and sequences that it samples."""

    def __init__(self, checkpoint: Path, adapter: Path, dtype: str = "float32") -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager"
        )
        self.folder = adapter
        self.model: Any = peft.PeftModel.from_pretrained(base, str(adapter)).eval()

    def sampled(self) -> list[tuple[list[int], list[int]]]:
        """Return prompts and the completions that the model samples, the same at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            ids = torch.randint(3, self.model.config.vocab_size, (_PROMPTS, _PROMPT_TOKENS))
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_TOKENS,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        rows: list[list[int]] = made.tolist()
        return [(row[:_PROMPT_TOKENS], row[_PROMPT_TOKENS:]) for row in rows]

    def probes(self, sequences: Sequence[Any] | None = None) -> Probes:
        """Return probes of the sequences, by default of sampled ones."""
        return peft_probes(self.model, sequences or self.sampled(), self.folder)

    def without(self, linears: Iterable[str]) -> "Trainer":
        """Make the trainer compute without the adapter of some linears; return it."""
        for name, module in self.model.named_modules():
            if hasattr(module, "scaling") and name.rpartition(".")[2] in set(linears):
                module.scaling["default"] = 0.0
        return self
