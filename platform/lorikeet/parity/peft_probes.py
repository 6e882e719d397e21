"""Probes made by a PEFT model, on the trainer's machine.

This module needs torch and PEFT, `sampled_probes` also transformers. No other module of the package
needs them.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lorikeet.errors import InvalidInput, LorikeetError
from lorikeet.parity.probes import Dtype, Probe, Probes
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.adapter_format.variants import outline

Messages = Sequence[Mapping[str, Any]]

DEFAULT_PROMPTS: tuple[Messages, ...] = tuple(
    ({"role": "user", "content": text},)
    for text in (
        "Hello! What can you do for me?",
        "Write one sentence about the sea.",
        "Explain in a few words what a catalog is.",
        "My order has not arrived yet. What now?",
        "List three numbers between 10 and 100.",
        "Translate to French: good morning.",
        "Write a short program that adds two numbers.",
        "What is the capital of Portugal?",
    )
)


class ScoredSequence(NamedTuple):
    """One sequence of tokens to score.

    messages: chat messages of which the trainer's chat template made `prompt_ids`; empty for other
        prompts.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    messages: Messages = ()


def peft_probes(model: Any, sequences: Sequence[Any], folder: Path | None = None) -> Probes:
    """Return probes: sequences, with the log-probabilities that a PEFT model and its base model
    give to the completions' tokens.

    The model computes one sequence at a time, without dropout; its mode is restored afterwards.

    model: a peft.PeftModel, unwrapped, whose active adapter is scored.
    sequences: prompt ids and completion ids of each sequence, and optionally the messages of which
        the prompt was made.
    folder: folder from which the adapter was loaded, to compute its digest; None: the adapter is
        saved from the model for that.

    Raises InvalidInput for a sequence without prompt or completion, and AdapterRejected for an
    adapter that cannot be served.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as work:
        blob = Path(work) / "blob"
        if folder is None:
            folder = Path(work) / "adapter"
            model.save_pretrained(str(folder))
        digest = write_blob(folder, blob)
        linears, scaling = outline(blob)
    base = model.get_base_model()
    probes = []
    with _evaluating(model):
        for prompt, completion, *messages in sequences:
            if not len(prompt) or not len(completion):
                raise InvalidInput("a sequence has no prompt or no completion", param="sequences")
            ids = [*map(int, prompt), *map(int, completion)]
            scores = _logprobs(model, ids, len(completion))
            with model.disable_adapter():
                base_scores = _logprobs(model, ids, len(completion))
            probes.append(
                Probe(
                    token_ids=ids,
                    logprobs=scores,
                    base_logprobs=base_scores,
                    messages=[dict(each) for each in (messages[0] if messages else ())],
                )
            )
    dtypes: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    return Probes(
        probes=probes,
        dtype=dtypes.get(str(base.dtype).removeprefix("torch.")),
        digest=digest,
        linears=list(linears),
        scaling=scaling,
        base_model=(getattr(base.config, "_name_or_path", "") or "")[:512] or None,
        peft_version=_peft_version(),
    )


def sampled_probes(
    folder: Path,
    base_model: str,
    prompts: Sequence[Messages | str],
    tokens: int,
    dtype: str = "auto",
    device: str = "cpu",
) -> Probes:
    """Load an adapter with PEFT, sample a completion of each prompt with it and score these.

    folder: folder that PEFT's save_pretrained wrote.
    base_model: folder of the base model, or its name on the Hugging Face Hub.
    prompts: messages, which the chat template of the adapter's folder or else of the base model
        renders, or texts.
    tokens: length of each completion, at most.
    dtype: data type of the base model; auto: as its checkpoint says.

    Raises LorikeetError if torch, transformers or PEFT is missing.
    """
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        raise LorikeetError(
            f"probes need {error.name}: pip install torch transformers peft"
        ) from error
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder if has_tokenizer else base_model)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = transformers.AutoTokenizer.from_pretrained(
            base_model
        ).chat_template
    base = transformers.AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype)
    model: Any = peft.PeftModel.from_pretrained(base, str(folder)).to(device).eval()
    torch.manual_seed(0)
    sequences = []
    for prompt in prompts:
        messages = () if isinstance(prompt, str) or not tokenizer.chat_template else prompt
        ids = (
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
            if messages
            else tokenizer(_text(prompt))["input_ids"]
        )
        made = model.generate(
            input_ids=torch.tensor([ids], device=device),
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long, device=device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=model.generation_config.pad_token_id or 0,
            ),
        )
        completion = made[0, len(ids) :].tolist()
        sequences.append(ScoredSequence(ids, completion, messages))
    return peft_probes(model, sequences, folder)


def _text(prompt: Messages | str) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(each["content"] for each in prompt)


def _logprobs(model: Any, ids: Sequence[int], count: int) -> list[float]:
    """Return the log-probabilities of the last `count` tokens, at temperature 1."""
    import torch

    with torch.inference_mode():
        tokens = torch.tensor([ids], device=model.device)
        logits = model(input_ids=tokens).logits[0, -count - 1 : -1].float()
        found = logits.log_softmax(-1).gather(1, tokens[0, -count:, None])[:, 0]
    return [min(0.0, value) for value in found.tolist()]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _peft_version() -> str:
    import peft

    return str(peft.__version__)
