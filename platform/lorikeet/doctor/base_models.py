"""Checks of base model folders: the files that engines and replicas read."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lorikeet.doctor.finding import Finding, ok, problem, warning
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.errors import InvalidInput, InvalidSetting
from lorikeet.gateway.sampling_defaults import read_sampling_defaults
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet_engine.adapter_format import (
    FAMILIES,
    BaseShape,
    quantized_linears,
    read_config,
    read_embedder,
)
from lorikeet_engine.errors import AdapterRejected, EngineError, ModelError, SettingsError

if TYPE_CHECKING:
    from lorikeet_engine.settings import EngineSettings

_POINTER = b"version https://git-lfs"
_TENSOR_PARALLEL = "tensor_parallel"
_OTHER_COPY = (
    "choose a copy that is not quantised, or in FP8, or in NF4, AWQ, GPTQ or W4A16 of 4 bits"
)
_FIXES = {
    "max_context": "lower LORIKEET_MAX_CONTEXT, or unset it",
    "quantization_config": "choose a copy that is not quantised, or in another format",
    _TENSOR_PARALLEL: "LORIKEET_TENSOR_PARALLEL=1 for it, or another number of GPUs",
    "tie_word_embeddings": 'write "tie_word_embeddings": false into config.json',
    "weight_dtype": "LORIKEET_WEIGHT_DTYPE=auto for it, or another folder",
}


def check_base_models(planned: PlannedStart) -> Iterator[Finding]:
    """Check the config, weights, tokenizer and chat template in each base model's folder."""
    yield from check_base_model_folders(planned)
    for name, folder in planned.settings.base_models.items():
        check, plan = f"base model {name}", planned.plans.get(name)
        if plan is not None and not (isinstance(plan, EngineError) and is_of_base_model(plan)):
            yield _check_dtype(check, folder, planned, planned.engine_settings(name))
            if planned.device == "cuda":
                yield from _check_attention(check, folder, planned.engine_settings(name))
                if planned.serves_fp8(name):
                    yield from _check_fp8(check, planned.engine_settings(name))
        if folder.is_dir():
            yield _check_text(check, folder)
            if planned.settings.generation_config[name] == "auto":
                yield from _check_sampling(check, folder)
            yield from _check_embedder(check, folder)


def check_base_model_folders(planned: PlannedStart) -> Iterator[Finding]:
    """Report base models' folders that hold no model that can be served with these settings."""
    for name, folder in planned.settings.base_models.items():
        plan = planned.plans.get(name)
        if isinstance(plan, EngineError) and is_of_base_model(plan):
            fix = _fix(folder, str(plan.fields.get("field")))
            yield problem(f"base model {name}", plan.message, fix)


def is_of_base_model(error: EngineError) -> bool:
    """Whether an error is about a base model's folder or settings, and not about memory."""
    return isinstance(error, ModelError) or error.fields.get("field") == _TENSOR_PARALLEL


def _fix(folder: Path, fault: str) -> str:
    """Return the remedy for a faulty folder.

    fault: the config key, file, tensor or setting at fault.
    """
    download = f"`hf download ORGANISATION/NAME --local-dir {folder}`"
    if not folder.is_dir():
        return f"correct the folder in LORIKEET_BASE_MODELS, or {download}"
    if fault in _FIXES:
        return _FIXES[fault]
    if fault.endswith(".safetensors") and _is_pointer(folder / fault):
        return f"the file is a Git LFS pointer: `git -C {folder} lfs pull`"
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        return "the weights are pickled: load them with transformers, and save_pretrained them"
    if fault.startswith("quantization_config"):
        return _OTHER_COPY
    if fault.endswith(".attn_factor"):
        return "write attention_factor into config.json in place of attn_factor"
    if fault.startswith("rope_"):
        return (
            "choose a model without it; if it was added for long prompts, remove "
            f"{fault.partition('.')[0]} from config.json, or use YaRN's"
        )
    if "." in fault:  # a file or a tensor, not a key of config.json
        other = f"; or {_OTHER_COPY}" if _is_quantised(folder) else ""
        return f"the folder is incomplete: {download}{other}"
    *names, last = (family.name for family in FAMILIES.values())
    return f"choose a model of a family that is served: {', '.join(names)} or {last}"


def _is_quantised(folder: Path) -> bool:
    try:
        return quantized_linears(read_config(folder)) is not None
    except ModelError:
        return False


def _is_pointer(file: Path) -> bool:
    return file.exists() and file.read_bytes()[: len(_POINTER)] == _POINTER


def _check_dtype(
    check: str, folder: Path, planned: PlannedStart, settings: "EngineSettings"
) -> Finding:
    """Report the dtypes in which the weights are stored and served; warn of bfloat16 in float16.

    check: subject of the findings, such as "base model qwen".
    settings: settings of the base model's engine.
    """
    served = settings.dtype
    config = read_config(folder)
    stored = config.get("dtype") or config.get("torch_dtype") or "unknown"
    quantized = quantized_linears(config)
    linears = f", linears {quantized.format}" if quantized else ""
    if settings.rounding is not None:
        linears += f", linears rounded to {settings.rounding}"
    if planned.stays_packed(settings):
        linears += " that stay packed"
    found = f"{folder}: {config['model_type']}, weights {stored}{linears}, served as {served}"
    if (stored, served) == ("bfloat16", "float16"):
        return warning(check, f"{found}, which overflows large values", "LORIKEET_DTYPE=bfloat16")
    return ok(check, found)


def _check_attention(check: str, folder: Path, served: "EngineSettings") -> Iterator[Finding]:
    """Warn if there is no fast attention kernel for the model; report a problem if GPU kernels do
    not take the width of its latent attention.

    check: subject of the findings, such as "base model qwen".
    served: settings of the base model's engine.
    """
    from lorikeet_engine.kernels.attention import check_latents, why_slow  # torch

    shape = BaseShape.from_config(read_config(folder))
    latents, width = shape.latents, shape.widest_head
    if latents is not None:
        width = latents.kv_rank
        try:
            check_latents(latents.kv_rank, latents.rotary)
        except SettingsError as error:
            yield problem(check, str(error), "choose another base model")
            return
    if reason := why_slow(width, served.torch_dtype):
        wide = served.torch_dtype.itemsize > 2
        fix = "LORIKEET_DTYPE=bfloat16" if wide else "choose a model with such heads"
        yield warning(check, f"{reason}: the more requests run, the longer each waits", fix)


def _check_fp8(check: str, served: "EngineSettings") -> Iterator[Finding]:
    """Report a problem if FP8 weights are served in another dtype than bfloat16.

    check: subject of the findings, such as "base model qwen".
    served: settings of the base model's engine.
    """
    if served.dtype != "bfloat16":
        found = f"the linears are served in FP8, which needs bfloat16, not {served.dtype}"
        yield problem(check, found, "LORIKEET_DTYPE=bfloat16")


def _check_sampling(check: str, folder: Path) -> Iterator[Finding]:
    """Report a sampling default in generation_config.json that would stop the start.

    check: subject of the findings, such as "base model qwen".
    folder: the base model's folder.
    """
    try:
        read_sampling_defaults(folder)
    except InvalidSetting as error:
        yield problem(check, error.message, "correct the file, or LORIKEET_GENERATION_CONFIG=none")


def _check_embedder(check: str, folder: Path) -> Iterator[Finding]:
    """Report files of sentence-transformers that describe a pipeline that is not served."""
    try:
        read_embedder(folder)
    except AdapterRejected as error:
        fix = "correct or remove the file; without it, vectors are the last token's"
        yield warning(check, f"embeds no texts: {error.message}", fix)


def _check_text(check: str, folder: Path) -> Finding:
    from lorikeet.text.prompts import PromptEncoder  # transformers

    save = f"save the base model's tokenizer into {folder} with its save_pretrained"
    try:
        encoder = PromptEncoder(folder)
    except Exception as error:  # tokenizers and transformers document no exceptions
        return problem(check, f"no tokenizer: {error}", save)
    hello = {"role": "user", "content": "Hello"}
    call = Call("doctor", Endpoint.CHAT, 0, "doctor", "doctor", None, messages=(hello,))
    try:
        (ids,) = encoder.encode(call, max_context=4096)
    except InvalidInput as error:
        fix = f"put the model's chat_template.jinja into {folder}"
        return warning(check, error.message, fix)
    vocabulary = read_config(folder).get("vocab_size", 0)
    tokens = encoder.backend.get_vocab_size()
    if tokens > vocabulary:
        found = f"the tokenizer has {tokens} tokens, the model {vocabulary}: it is another model's"
        return problem(check, found, save)
    tools = "served" if encoder.takes_tools else "refused"
    found = f"the chat template works: Hello is a prompt of {len(ids)} tokens; tools are {tools}"
    return ok(check, found)
