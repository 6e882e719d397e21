"""Adapters of a mixture of experts, in each form that past and present releases of PEFT save.

For today's PEFT the experts' linears are parameters of all experts; once they were modules of each.
"""

from collections.abc import Iterator
from typing import Any

import torch

from tests.corpus.cases import RANKS, Case
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import EQUAL, Axis, Build, Feature
from tests.corpus.peft_training import EVERY_LINEAR, save
from tests.corpus.table import ACCEPTED
from tests.engine.moe_adapters import BOTH, save_numbered

MIXTURE = "qwen3_moe"
"""Name of the base model in tests/corpus/bases.py."""
_ONLY_PEFT = frozenset({Axis.TOOL})
_WITHOUT_TOOLS = (Axis.NUMBERS, Axis.WRAPPING, Axis.PLACE, Axis.CONFIG, Axis.BASE_NAME, Axis.FILES)


def _trained(name: str, build: Build, says: str = EQUAL) -> Feature:
    return Feature(name, Axis.TRAINING, build, says, _ONLY_PEFT)


def _options(name: str, says: str = EQUAL, **options: Any) -> Feature:
    """Feature with an adapter that LoraConfig(**options) makes.

    Without target_modules in the options, only parameters are targeted.
    """
    options = {"target_modules": [], **options}
    return _trained(name, lambda draft: save(draft, **options), says)


def _of_each_expert(name: str, kept: str = "", says: str = EQUAL, **config: Any) -> Feature:
    """Feature with matrices of each expert, in bfloat16.

    kept: part of the names of the tensors to keep.
    """

    def build(draft: Draft) -> None:
        save_numbered(draft.base.folder, draft.folder, draft.rank, seed=draft.seed)
        draft.edit_config(lora_alpha=2 * draft.rank, **config)

        def store(tensors: Tensors) -> Tensors:
            # smaller values than `save` writes would give larger scores than float32's tolerance
            # allows
            small = {n: t * (0.3 if "lora_A" in n else 1.0) for n, t in tensors.items()}
            return {n: t.to(torch.bfloat16) for n, t in small.items() if kept in n}

        draft.edit_weights(store)

    # Experts of several dtypes are refused: tests/engine/adapter_format/test_experts.py.
    return Feature(name, Axis.TRAINING, build, says, _ONLY_PEFT | {Axis.NUMBERS})


FORMS: tuple[Feature, ...] = (
    _options("every linear by name", target_modules=EVERY_LINEAR),
    _options("all-linear", target_modules="all-linear"),
    _options("the experts by an expression", target_modules=r".*\.experts\.(gate|up|down)_proj"),
    _options("attention alone", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    _options("both parameters", target_modules=["q_proj"], target_parameters=BOTH),
    _options("gate_up_proj alone", target_parameters=BOTH[:1]),
    _options("down_proj alone", target_modules=["o_proj"], target_parameters=BOTH[1:]),
    _options(
        "other parameters of other layers",
        target_parameters=["layers.0.mlp.experts.gate_up_proj", "layers.2.mlp.experts.down_proj"],
    ),
    _options("the router", target_modules=["gate"]),
    _options(
        "bare parameters", target_parameters=["gate.weight", "k_proj.weight", "experts.down_proj"]
    ),
    _options("rsLoRA", target_modules=["v_proj"], target_parameters=BOTH, use_rslora=True),
    _options("rsLoRA on every linear", target_modules=EVERY_LINEAR, use_rslora=True),
    _options(
        "patterns",
        target_modules=["q_proj"],
        target_parameters=BOTH,
        rank_pattern={"experts.gate_up_proj": 3, "q_proj": 5},
        alpha_pattern={"experts.down_proj": 3, r"layers\.1\..*gate_up_proj": 40},
    ),
    _options("beside lm_head", target_modules=["lm_head"], target_parameters=BOTH),
    _options("some layers", target_modules=["q_proj"], layers_to_transform=[0, 2]),
    _of_each_expert("matrices of each expert"),
    _of_each_expert(
        "one expert alone",
        ".experts.0.",
        "weights for 1 of the experts, but none for expert 1",
        target_modules=r".*\.experts\.0\.\w+",
    ),
    _of_each_expert("an expert is missing", ".experts.1.", "no weight is for it"),
    # findings/peft_layers_of_experts.sh
    _of_each_expert(
        "one expert of each layer, as PEFT before 0.20 counts layers",
        ".experts.1.",
        "experts.1.down_proj, which it leaves out",
        target_modules=["gate_proj", "up_proj", "down_proj"],
        layers_to_transform=[1],
        peft_version="0.19.1",
    ),
    _options("DoRA", target_modules=["q_proj", "o_proj"], use_dora=True),
)


def mixture_cases() -> Iterator[Case]:
    """One case for each form, with other features that are served."""
    for number, form in enumerate(FORMS):
        chosen = [form]
        for axis in () if form.says else _WITHOUT_TOOLS:
            fitting = [f for f in ACCEPTED[axis] if all(map(f.fits, chosen))]
            chosen += fitting[number % len(fitting) :][:1] if fitting else []
        yield Case(MIXTURE, RANKS[number % len(RANKS)], tuple(chosen), number)
