"""Converts adapters on experts of mixture-of-experts models from trainers' forms to a blob's form.

A blob has two tensors for each of a layer's experts.gate_proj, up_proj and down_proj: A [experts,
rank, d_in] and B [experts, d_out, rank]; a leading 1 means that all experts share the matrix.
up_proj has no A if it shares gate_proj's. Trainers save these forms:

    parameters   mlp.experts and mlp.experts.base_layer: PEFT's wrappers of two parameters,
                 gate_up_proj (both linears, stacked) and down_proj, nested if there are both.
                 A [experts · rank, d_in] is ordered by experts, B [d_out, rank · experts] by ranks.
                 PEFT before 0.19.1 took the parameters as [experts, in, out], as transformers 5
                 does not store them: there A is [experts · rank, d_out], B [d_in, rank · experts],
                 and the delta of each expert (B A)ᵀ. gpt-oss's parameters are [experts, in, out],
                 and other releases turn them (_is_swapped). Its gate_up_proj has gates and values
                 alternately; B is cut into halves all the same, and spec.read_spec, which knows the
                 base model, marks such halves
    numbered     mlp.experts.7.gate_proj: matrices of each expert, as a linear of its own; Unsloth's
                 mlp.experts.gate_up_projs.7 of gpt-oss in four bits has both linears
    stacked      mlp.experts.gate_proj: a blob's form, or a matrix that all experts share

Mixtral's old names w1, w3 and w2 stand for gate_proj, up_proj and down_proj. If PEFT has converted
a numbered adapter, its gate_up_proj has twice the rank, and half of B is zero: such a gate_up_proj
is split into two linears again.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lorikeet_engine.adapter_format.experts.names import (
    DOWN,
    DOWNS,
    GATE,
    GATE_UP,
    GATE_UPS,
    NUMBERED,
    PARAMETER,
    UP,
    WRAPPED,
    experts_kind,
    first_parameter,
    is_of_experts,
)
from lorikeet_engine.adapter_format.experts.unsloth import is_grouped_by_expert
from lorikeet_engine.adapter_format.header import DTYPE_BYTES
from lorikeet_engine.adapter_format.lora_config import LoraConfig
from lorikeet_engine.adapter_format.peft_release import (
    EXPERTS_IN_QUESTION,
    EXPERTS_OUT_IN,
    training_release,
)
from lorikeet_engine.adapter_format.saved_weights import SavedTensor
from lorikeet_engine.adapter_format.spec import check_rank
from lorikeet_engine.adapter_format.targets import targets_parameter
from lorikeet_engine.errors import AdapterRejected

Pair = Mapping[str, SavedTensor]
Arrange = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor [experts, rows, columns] for a blob, an adapter's file, made of a trainer's tensors.

    sources: the trainer's tensors; their arranged elements follow one another in the file.
    arrange: function that reorders the elements of one source. Takes them as [elements], in
        unsigned integers as wide as the dtype.
    """

    sources: tuple[SavedTensor, ...]
    shape: tuple[int, ...]
    arrange: Arrange

    @property
    def blob_dtype(self) -> str:
        """Dtype that the tensor has in a stored adapter (blob), in safetensors' naming."""
        return self.sources[0].blob_dtype

    def pieces(self) -> Iterator[bytes]:
        """Yield the tensor's bytes in blob_dtype, one source at a time.

        Raises AdapterRejected if a file ends early, or if float32 cannot hold a float64 value.
        """
        for source in self.sources:
            yield self.arrange(_words(source)).tobytes()


Stored = SavedTensor | ExpertTensor
"""A tensor of one linear, as a trainer saved it or stacked for all experts."""


def name_parameters(
    pairs: Mapping[str, Pair],
    raw: Mapping[str, Any],
    warn: Callable[[str], object] = lambda _: None,
) -> tuple[dict[str, Pair], str]:
    """Rename the pairs of PEFT's parameter wrappers to the parameters that these wrap.

    A wrapper, named mlp.experts or mlp.experts.base_layer, wraps gate_up_proj or down_proj. If a
    layer has wrappers of both, their shapes tell which is which; if it has only one, the config's
    target_parameters tell. Of experts without gates, the inner wrapper is that of up_proj. A linear
    whose weight is targeted as a parameter gets the weight's name.
    Some releases of PEFT took a parameter's inputs for its outputs, so that A and B are swapped.
    Such pairs are transposed: A is then [rank · experts, d_in], ordered by ranks, and B [d_out,
    experts · rank], by experts.

    Also returns "gpt-oss" or "another base model", as whose the pairs were read, if their shapes do
    not show their orientation; else an empty text.

    pairs: A and B by module, in the trainer's naming.
    raw: PEFT's config.
    warn: called with a sentence if the folder does not show which release of PEFT wrote a pair.

    Raises AdapterRejected if shapes and target_parameters do not fit any of the parameters.
    """
    named: dict[str, Pair] = {}
    hidden, read_for = _hidden_size(pairs), ""
    for saved, pair in pairs.items():
        match = WRAPPED.fullmatch(saved)
        if match or PARAMETER.fullmatch(saved):
            pair = {**pair, "A": replace(pair["A"], by_experts=True)}
        if match is None:
            is_parameter = targets_parameter(raw, f"{saved}.weight")
            named[f"{saved}.weight" if is_parameter else saved] = pair
            continue
        other = pairs.get(match[1] if match[2] else f"{match[1]}.base_layer")
        if other is not None and first_parameter(match[1]) == UP:
            parameter, is_old = UP if match[2] else DOWN, None
        else:
            parameter, is_old = _wrapped_parameter(match[1], pair, other, raw)
        if is_old is None:
            is_old = _shown_old(parameter, pair, hidden)
        if is_old is None:
            of_gpt_oss = _names_gpt_oss(raw)
            read_for = experts_kind(clamped=of_gpt_oss)
            if of_gpt_oss:
                is_old = _is_swapped(parameter, pair, raw, warn)
            else:
                is_old = _is_old(parameter, raw, warn)
        grouped = is_grouped_by_expert(parameter, raw)
        pair = {**pair, "B": replace(pair["B"], by_experts=grouped)}
        named[f"{match[1]}.{parameter}"] = _transposed(pair) if is_old else pair
    return named, read_for


def _transposed(pair: Pair) -> Pair:
    return {"A": pair["B"].transpose(), "B": pair["A"].transpose()}


def _hidden_size(pairs: Mapping[str, Pair]) -> int | None:
    """Return the base model's hidden size, from adapted linears beside the experts, else None."""
    for module, pair in pairs.items():
        last = module.rpartition(".")[2]
        if last in ("q_proj", "k_proj", "v_proj", "lm_head"):
            return pair["A"].shape[-1]
        if last == "o_proj":
            return pair["B"].shape[0]
    return None


def _widths(parameter: str, pair: Pair) -> tuple[int, int]:
    """Return the width that is the hidden size if A and B are not swapped, then that if they are.

    parameter: parameter that the pair adapts: gate_up_proj or down_proj.
    """
    new, old = pair["A"].shape[-1], pair["B"].shape[0]
    return (old, new) if parameter == DOWN else (new, old)


def _shown_old(parameter: str, pair: Pair, hidden: int | None) -> bool | None:
    """Whether a pair's A and B are swapped, as some releases of PEFT save them; None if the hidden
    size does not show it.

    parameter: parameter that the pair adapts: gate_up_proj or down_proj.
    hidden: the base model's hidden size, if it is known.
    """
    new, old = _widths(parameter, pair)
    return hidden == old if hidden in (new, old) and new != old else None


def _is_old(parameter: str, raw: Mapping[str, Any], warn: Callable[[str], object]) -> bool:
    """Whether PEFT before 0.19.1 wrote a pair, if shapes do not show it.

    parameter: parameter that the pair adapts: gate_up_proj or down_proj.
    raw: PEFT's config.
    warn: called with a sentence if the config does not show the release.
    """
    release = training_release(raw)
    if release is None:
        warn(
            f"PEFT before 0.19.1 saves {parameter} of experts the other way round, and neither the "
            "weights nor adapter_config.json show which release trained: read as the newest does; "
            "set peft_version to the release that trained"
        )
        return False
    return release < EXPERTS_OUT_IN


def _is_swapped(
    parameter: str, pair: Pair, raw: Mapping[str, Any], warn: Callable[[str], object]
) -> bool:
    """Whether PEFT took a parameter of gpt-oss's experts as [experts, out, in], so that A and B are
    swapped.

    That depends on the release of transformers as well: 0.19.0 does with transformers 5, and later
    releases do with transformers 4.

    parameter: parameter that the pair adapts: gate_up_proj or down_proj.
    raw: PEFT's config.
    warn: called with a sentence if neither shapes nor the config show it.
    """
    new, old = _widths(parameter, pair)
    if parameter == GATE_UP and new != old:  # gates and values: wider than the hidden size
        return new > old
    release = training_release(raw)
    if release is None or release >= EXPERTS_IN_QUESTION:
        warn(
            f"PEFT since 0.19 saves {parameter} of gpt-oss's experts the other way round with one "
            f"of transformers 4 and 5, and weights of {parameter} alone do not show which: read as "
            "with transformers 5; train with transformers 5, or both parameters"
        )
    return release == EXPERTS_IN_QUESTION


def _names_gpt_oss(raw: Mapping[str, Any]) -> bool:
    base = raw.get("base_model_name_or_path")
    return isinstance(base, str) and "gpt-oss" in base.lower().replace("_", "-")


def _wrapped_parameter(
    experts: str, pair: Pair, other: Pair | None, raw: Mapping[str, Any]
) -> tuple[str, bool | None]:
    """Return the parameter that a pair adapts, and whether PEFT before 0.19.1 wrote the pair.

    The second result is None if there is no other pair to compare shapes with.

    experts: module that contains the experts.
    other: the other pair of the same experts; None if there is only one.
    raw: PEFT's config.
    """
    if other is not None:
        for is_old, one, two in (
            (False, pair, other),
            (True, _transposed(pair), _transposed(other)),
        ):
            if _is_down_of(one, two):
                return DOWN, is_old
            if _is_down_of(two, one):
                return GATE_UP, is_old
        raise AdapterRejected(
            f"{experts} has two pairs of weights whose shapes are not those of {GATE_UP} and "
            f"{DOWN}: the file is damaged",
            field=experts,
        )
    both = first_parameter(experts), DOWN
    targeted = [name for name in both if targets_parameter(raw, f"{experts}.{name}")]
    if len(targeted) != 1:
        named = " and ".join(targeted) or "neither of its parameters"
        raise AdapterRejected(
            f"{experts} has weights for one parameter and target_parameters selects {named}: "
            "save the adapter again with the config that it was trained with",
            field="target_parameters",
        )
    return targeted[0], None


def _is_down_of(down: Pair, gate_up: Pair) -> bool:
    """Whether two pairs have the shapes of down_proj and gate_up_proj of the same experts.

    With hidden size H and intermediate size I, gate_up maps H to 2I, and down maps I to H.
    """
    hidden, both = gate_up["A"].shape[-1], gate_up["B"].shape[0]
    return both == 2 * down["A"].shape[-1] and hidden == down["B"].shape[0]


def stack_experts(
    pairs: Mapping[str, Pair], config: LoraConfig
) -> tuple[dict[str, Mapping[str, Stored]], LoraConfig]:
    """Stack pairs of single experts, and split wrapped parameters, for a blob, an adapter's file.

    Returns the tensors by module, and the config.

    pairs: A and B by module, named as in blobs; pairs of modules that are not experts are returned
        unchanged.
    config: config for the modules of `pairs`. The returned config is for the returned modules.

    Raises AdapterRejected if the same weights are in two forms, if their shape does not fit the
    config, if only some of a linear's experts have weights, or if experts differ in shape, dtype or
    scaling.
    """
    modules: dict[str, Mapping[str, Stored]] = {}
    origins: dict[str, str] = {}
    numbered: dict[str, dict[int, str]] = {}
    for module, pair in pairs.items():
        parts: Mapping[str, Mapping[str, Stored]]
        if match := NUMBERED.fullmatch(module):
            numbered.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = module
            continue
        match = PARAMETER.fullmatch(module)
        if match and match[2] == GATE_UP and len(pair["A"].shape) == 3:
            raise AdapterRejected(
                f"{module}: want {GATE} and {UP}, or PEFT's two-dimensional weights of {GATE_UP}",
                field=module,
            )
        if match and len(pair["A"].shape) == len(pair["B"].shape) == 2:
            parts = _of_parameter(match[1], match[2], module, pair, config)
        else:
            check_rank(module, pair, want=config.rank(module))
            stacked = {side: _as_stacked(tensor) for side, tensor in pair.items()}
            parts = {module: stacked if is_of_experts(module) else pair}
        _add(modules, parts)
        origins |= dict.fromkeys(parts, module)
    for module, members in numbered.items():
        stacked = _of_numbered(module, members, pairs, config)
        if module.endswith(f".{GATE_UPS}"):
            parts = _halves(module.removesuffix(GATE_UPS), stacked)
        else:
            parts = {module.replace(f".{DOWNS}", f".{DOWN}"): stacked}
        _add(modules, parts)
        origins |= dict.fromkeys(parts, members[0])
    return modules, _config_of(modules, origins, config)


def _add(
    modules: dict[str, Mapping[str, Stored]], parts: Mapping[str, Mapping[str, Stored]]
) -> None:
    for module in modules.keys() & parts.keys():
        raise AdapterRejected(f"{module} is in the file in two forms", field=module)
    modules |= parts


def _config_of(
    modules: Mapping[str, Mapping[str, Stored]], origins: Mapping[str, str], config: LoraConfig
) -> LoraConfig:
    """Return a config in which each module has the scaling that it was trained with.

    origins: for each of these modules, the module of `config` that it was made from.
    """
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, pair in modules.items():
        rank, origin = pair["B"].shape[-1], origins[module]
        alpha = config.alpha_pattern.get(origin, config.lora_alpha)
        if rank != config.rank(origin):
            share = rank / config.rank(origin)
            alpha *= math.sqrt(share) if config.use_rslora else share
        ranks |= {module: rank} if rank != config.r else {}
        alphas |= {module: alpha} if alpha != config.lora_alpha else {}
    return replace(config, rank_pattern=ranks, alpha_pattern=alphas)


def _of_parameter(
    experts: str, parameter: str, module: str, pair: Pair, config: LoraConfig
) -> dict[str, dict[str, ExpertTensor]]:
    """Split PEFT's wrapper of a parameter into the linears that the parameter contains, by module.

    experts: module that contains the experts.
    parameter: gate_up_proj or down_proj; up_proj of experts without gates.
    module: name of the wrapper in `config`.
    config: tells the wrapper's LoRA rank.
    """
    rank, rows = config.rank(module), pair["A"].shape[0]
    if len(pair["A"].shape) != 2 or rows % rank or rows == rank:
        raise AdapterRejected(
            f"{module}: lora_A {list(pair['A'].shape)} is not [experts · rank, d_in] and the "
            f"config says rank {rank}",
            field=module,
        )
    count, d_out = rows // rank, pair["B"].shape[0]
    every = slice(0, rank)
    if parameter in (UP, DOWN):
        return {module: _cut(pair, rank, count, slice(0, d_out), every)}
    half = d_out // 2
    gate_ranks = up_ranks = every
    # Only releases that save B by ranks convert numbered adapters.
    if split := not pair["B"].by_experts and _is_block_diagonal(pair["B"], rank, count):
        gate_ranks, up_ranks = slice(0, rank // 2), slice(rank // 2, rank)
    gate = _cut(pair, rank, count, slice(0, half), gate_ranks)
    up = _cut(pair, rank, count, slice(half, d_out), up_ranks)
    return {f"{experts}.{GATE}": gate, f"{experts}.{UP}": up if split else {"B": up["B"]}}


def _cut(
    pair: Pair, rank: int, count: int, outputs: slice, ranks: slice
) -> dict[str, ExpertTensor]:
    """Cut one linear's A and B, for all experts, out of the matrices of a wrapped parameter.

    pair: A [experts · rank, d_in] and B [d_out, rank · experts] of the parameter; each is ordered
        by experts or by ranks, as its by_experts says.
    count: number of experts.
    outputs: rows of B that belong to the linear.
    ranks: ranks of A and B that belong to the linear.
    """
    d_in, d_out, kept = pair["A"].shape[1], pair["B"].shape[0], ranks.stop - ranks.start

    def of_a(words: np.ndarray) -> np.ndarray:
        if pair["A"].by_experts:
            return words.reshape(count, rank, d_in)[:, ranks]
        return words.reshape(rank, count, d_in)[ranks].transpose(1, 0, 2)

    def of_b(words: np.ndarray) -> np.ndarray:
        if pair["B"].by_experts:
            return words.reshape(d_out, count, rank)[outputs, :, ranks].transpose(1, 0, 2)
        return words.reshape(d_out, rank, count)[outputs, ranks].transpose(2, 0, 1)

    b_shape = (count, outputs.stop - outputs.start, kept)
    return {
        "A": ExpertTensor((pair["A"],), (count, kept, d_in), of_a),
        "B": ExpertTensor((pair["B"],), b_shape, of_b),
    }


def _is_block_diagonal(b: SavedTensor, rank: int, count: int) -> bool:
    """Whether gate_proj uses only the first half of the ranks, and up_proj only the second half.

    b: B of a gate_up_proj, [2 · intermediate, rank · count].
    count: number of experts.
    """
    if rank % 2 or b.shape[0] % 2:
        return False
    words = _words(b).reshape(2, b.shape[0] // 2, 2, rank // 2, count)
    sign = np.array(1 << (8 * words.itemsize - 1), words.dtype)
    return not ((words[0, :, 1] | words[1, :, 0]) & ~sign).any()


def _of_numbered(
    module: str, members: Mapping[int, str], pairs: Mapping[str, Pair], config: LoraConfig
) -> dict[str, ExpertTensor]:
    """Stack one linear's A, and its B, of all experts of a layer that have numbers in their names.

    module: name of the linear in blobs (stored adapters).
    members: for each expert's number, its module in `pairs`.
    config: tells rank and scaling of each module.

    Raises AdapterRejected if an expert lacks matrices, or if experts differ in shape, dtype or
    scaling.
    """
    missing = next(number for number in range(len(members) + 1) if number not in members)
    # A single matrix, stacked, would apply to every expert.
    if missing < len(members) or len(members) == 1:
        raise AdapterRejected(
            f"{module}: there are weights for {len(members)} of the experts, but none for expert "
            f"{missing}: train and save all of them",
            field=module,
        )
    first, tensors = members[0], {}
    check_rank(first, pairs[first], want=config.rank(first))
    for side in "AB":
        sources = tuple(pairs[members[number]][side] for number in range(len(members)))
        for number, source in enumerate(sources):
            other = members[number]
            if (source.shape, source.blob_dtype) != (sources[0].shape, sources[0].blob_dtype):
                raise _differ(other, first, "shape or dtype")
            if config.scaling(other) != config.scaling(first):
                raise _differ(other, first, "scaling")
        shape = (len(sources), *sources[0].shape)
        tensors[side] = ExpertTensor(sources, shape, lambda words: words)
    return tensors


def _halves(
    experts: str, stacked: Mapping[str, ExpertTensor]
) -> dict[str, dict[str, ExpertTensor]]:
    """Split gate_up_proj of all experts into gate_proj and up_proj, which share A, by module.

    experts: path of the module that contains the experts, with a dot at its end.
    stacked: A and B of gate_up_proj.
    """
    count, d_out, rank = stacked["B"].shape
    half = d_out // 2

    def tensor(rows: slice) -> ExpertTensor:
        shape = (count, rows.stop - rows.start, rank)
        sources = stacked["B"].sources
        return ExpertTensor(sources, shape, lambda words: words.reshape(d_out, rank)[rows])

    gate, up = tensor(slice(0, half)), tensor(slice(half, d_out))
    return {f"{experts}{GATE}": {"A": stacked["A"], "B": gate}, f"{experts}{UP}": {"B": up}}


def _differ(module: str, other: str, what: str) -> AdapterRejected:
    return AdapterRejected(
        f"{module} has another {what} than {other}: all experts of a linear are served with one "
        "rank and alpha; train them with one",
        field=module,
    )


def _as_stacked(tensor: SavedTensor) -> ExpertTensor:
    shape = tensor.shape if len(tensor.shape) == 3 else (1, *tensor.shape)
    return ExpertTensor((tensor,), shape, lambda words: words)


def _words(tensor: SavedTensor) -> np.ndarray:
    return np.frombuffer(b"".join(tensor.pieces()), f"<u{DTYPE_BYTES[tensor.blob_dtype]}")
