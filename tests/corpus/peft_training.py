"""Training of adapters with PEFT and transformers' Trainer, saved as they save them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import initialize_lora_eva_weights
from peft.tuners.lora.loraga import preprocess_loraga

from tests.corpus.draft import Draft
from tests.corpus.features import EQUAL, Axis, Feature
from tests.engine.peft_adapters import saved

EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SOME_LINEARS = ["q_proj", "down_proj"]


def save(draft: Draft, config: peft.PeftConfig | None = None, **options: Any) -> None:
    """Save an adapter with random weights; options: LoraConfig's."""
    with _seeded(draft):
        model = peft.get_peft_model(draft.base.model(), config or lora(draft, **options))
        grow(model)
        saved(model, draft.folder)


def by_peft(name: str, says: str = EQUAL, **options: Any) -> Feature:
    """Return the feature of an adapter that LoraConfig(**options) makes."""
    return Feature(name, Axis.TRAINING, lambda draft: save(draft, **options), says)


def lora(draft: Draft, **options: Any) -> peft.LoraConfig:
    """Return a config of the draft's rank; without targets, PEFT chooses them."""
    common = {"r": draft.rank, "lora_alpha": 2 * draft.rank, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**common, **options})


def grow(model: torch.nn.Module) -> None:
    """Change all trained parameters by about as much as training would."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)


def save_biased(draft: Draft) -> None:
    """Save an adapter with a trained bias of o_proj, which the base model does not have."""
    save(draft, target_modules=["o_proj"], bias="all")
    name = "base_model.model.model.layers.0.self_attn.o_proj.base_layer.bias"
    draft.edit_weights(lambda tensors: {name: torch.ones(draft.base.shape.hidden), **tensors})


def save_converted(draft: Draft, init: str, **options: Any) -> None:
    """Save an adapter initialized from the base model's weights as the difference to its start."""
    config = lora(draft, init_lora_weights=init, target_modules=_SOME_LINEARS, **options)
    with _seeded(draft):
        model = peft.get_peft_model(_prepared(draft, config), config)
        began = draft.scratch / "began"
        model.peft_config["default"].init_lora_weights = True  # as in PEFT's documentation
        model.save_pretrained(began)
        model.peft_config["default"].init_lora_weights = init
        grow(model)
        model.save_pretrained(draft.folder, path_initial_model_for_weight_conversion=str(began))


def save_unconverted(draft: Draft, init: str, **options: Any) -> None:
    """Save an adapter initialized from the base model's weights, unconverted; it is right only with
    a changed base model.
    """
    config = lora(draft, init_lora_weights=init, target_modules=_SOME_LINEARS, **options)
    with _seeded(draft):
        peft.get_peft_model(_prepared(draft, config), config).save_pretrained(draft.folder)


def save_disguised(draft: Draft) -> None:
    """Save PiSSA's weights with a config of an ordinary initialization."""
    config = lora(draft, init_lora_weights="pissa", target_modules=_SOME_LINEARS)
    with _seeded(draft):
        model = peft.get_peft_model(draft.base.model(), config)
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(draft.folder)


def save_eva(draft: Draft) -> None:
    """Save an adapter of EVA, which gives each module another rank."""
    config = lora(
        draft,
        r=min(draft.rank, 8),  # more of them takes seconds
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=2.0, tau=0.9),
        target_modules=_SOME_LINEARS,
    )
    with _seeded(draft):
        model = peft.get_peft_model(draft.base.model(), config)
        prompts = [{"input_ids": _tokens(4, 32)} for _ in range(4)]
        initialize_lora_eva_weights(model, prompts, show_progress_bar=False)
        grow(model)
        model.save_pretrained(draft.folder)


def save_with_trainer(draft: Draft) -> None:
    """Save a checkpoint of transformers' Trainer after one step, with all its files."""
    out = draft.scratch / "out"
    with _seeded(draft):
        model = peft.get_peft_model(draft.base.model(), lora(draft, target_modules=_SOME_LINEARS))
        ids = _tokens(2, 8)
        transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(out),
                max_steps=1,
                save_steps=1,
                learning_rate=0.05,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        ).train()
    (out / "checkpoint-1").rename(draft.folder)


def save_combined(draft: Draft, combination: str) -> None:
    """Save an adapter that PEFT combined from two, in a folder named after it."""
    with _seeded(draft):
        model = peft.get_peft_model(draft.base.model(), lora(draft, target_modules=_SOME_LINEARS))
        model.add_adapter("other", lora(draft, target_modules=_SOME_LINEARS))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(0.0, 0.1)
        both = ["default", "other"]
        model.add_weighted_adapter(both, [0.7, 0.6], "both", combination_type=combination)
        model.save_pretrained(draft.scratch / "out", selected_adapters=["both"])
    (draft.scratch / "out" / "both").rename(draft.folder)


def save_resized(draft: Draft) -> None:
    """Save an adapter of a model to whose vocabulary tokens were added."""
    with _seeded(draft):
        base = draft.base.model()
        base.resize_token_embeddings(base.config.vocab_size + 8)
        model = peft.get_peft_model(base, lora(draft, target_modules=["q_proj"]))
        model.save_pretrained(draft.folder)


def _prepared(draft: Draft, config: peft.LoraConfig) -> Any:
    """Return the base model, prepared with the data that CorDA and LoRA-GA need."""
    base = draft.base.model()
    ids = _tokens(16, 24)
    if config.init_lora_weights == "corda":
        preprocess_corda(base, config, run_model=lambda: [base(input_ids=row[None]) for row in ids])
    if config.init_lora_weights == "lora_ga":
        preprocess_loraga(base, config, lambda: base(input_ids=ids, labels=ids).loss.backward())
    return base


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 256, (rows, length))


@contextmanager
def _seeded(draft: Draft) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draft.seed)
        yield
