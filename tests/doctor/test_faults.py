"""Each planted fault is the only finding, and names its fix; without faults there is no problem."""

import json
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadtest.ports import free_port
from lorikeet.doctor import software
from lorikeet.doctor.finding import Severity
from lorikeet.doctor.machine import Cuda
from lorikeet.gateway.body import MAX_JSON_BYTES
from lorikeet.ray_variables import LARGEST_MESSAGE
from lorikeet.replica.request_builder import MOST_LOGPROBS
from lorikeet_engine.models.stored_tensors import SINGLE
from tests.doctor.conftest import GIB, H100, HOST, Patient, faults, keys_of, variable
from tests.engine.conftest import LATENT, save_all
from tests.engine.models.quantized_checkpoints import AWQ, awq, linears
from tests.gateway.test_oidc import running_issuer

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM


def test_a_good_start_has_no_findings_and_leaves_nothing_behind(patient: Patient) -> None:
    before = keys_of(patient.environ["LORIKEET_CATALOG"])
    findings = patient.examined()
    assert [finding for finding in findings if finding.severity is PROBLEM] == []
    # a developer's machine may have its own Ray running
    assert [finding for finding in faults(findings) if finding.check != "ports"] == []
    assert len({finding.check for finding in findings}) >= 14
    assert keys_of(patient.environ["LORIKEET_CATALOG"]) == before
    assert not Path(patient.environ["LORIKEET_CACHE_DIR"]).exists()


class Fault(NamedTuple):
    """A planted fault and its expected finding.

    checks: name of the check to run.
    change: fields of the patient; in `more` an empty value unsets a variable.
    message, fix: patterns that the finding must match.
    """

    checks: str
    change: Mapping[str, object]
    severity: Severity
    message: str
    fix: str


A100 = replace(H100, name="NVIDIA A100", capability=(8, 0))
T4 = replace(H100, name="Tesla T4", capability=(7, 5))


def gpus(count: int, **more: str) -> dict[str, object]:
    environ = {f"LORIKEET_{name.upper()}": value for name, value in more.items()}
    return {"cuda": Cuda((H100,) * count, (13, 0), (13, 0)), "more": environ}


PLANTED = {
    "a misspelt variable": Fault(
        "settings",
        variable("KV_CACHE_MEMROY", "1GiB"),
        PROBLEM,
        "KV_CACHE_MEMROY is not a",
        "KV_CACHE_MEMORY",
    ),
    "a bad value": Fault(
        "settings", variable("REPLICAS", "many"), PROBLEM, "REPLICAS='many'", "correct it"
    ),
    "settings that contradict": Fault(
        "settings",
        variable("MAX_BATCH_TOKENS", "8"),
        PROBLEM,
        "want at least max_running",
        "LORIKEET_",
    ),
    "Ray not told to stream fast": Fault(
        "ray variables",
        {"more": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": ""}},
        WARNING,
        "is not set",
        "export RAY_SERVE_THROUGHPUT_OPTIMIZED=1",
    ),
    "Ray's messages too small": Fault(
        "ray variables",
        {"more": {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "4194304"}},
        WARNING,
        "'4194304'",
        "=134217728",
    ),
    "processes behind every other program": Fault(
        "ray variables",
        {"more": {"RAY_worker_niceness": "15"}},
        WARNING,
        "'15': engines and gateways run at niceness 15",
        "export RAY_worker_niceness=0",
    ),
    "Ray open to everybody": Fault(
        "ray variables",
        {"more": {"RAY_AUTH_MODE": "disabled"}},
        WARNING,
        "can run code",
        "RAY_AUTH_MODE=token",
    ),
    "no such model folder": Fault(
        "base models",
        variable("BASE_MODELS", "lorikeet-demo=/nowhere"),
        PROBLEM,
        "/nowhere/config.json does not exist",
        "LORIKEET_BASE_MODELS, or `hf download",
    ),
    "a context longer than the model's": Fault(
        "base models",
        variable("MAX_CONTEXT", "1000000"),
        PROBLEM,
        "max_position_embeddings",
        "lower LORIKEET_MAX_CONTEXT",
    ),
    "a weight dtype that there is not": Fault(
        "settings",
        variable("WEIGHT_DTYPE", "nf8"),
        PROBLEM,
        "'auto', 'packed', 'nf4' or 'fp8'",
        "correct it",
    ),
    "a KV dtype that there is not": Fault(
        "settings", variable("KV_DTYPE", "int8"), PROBLEM, "'auto' or 'fp8'", "correct it"
    ),
    "bfloat16 weights as float16": Fault(
        "base models", variable("DTYPE", "float16"), WARNING, "bfloat16", "LORIKEET_DTYPE=bfloat16"
    ),
    "a dtype without attention kernels": Fault(
        "base models",
        gpus(2, dtype="float32"),
        WARNING,
        "16-bit dtypes, and this is torch.float32.*without CUDA graphs",
        "LORIKEET_DTYPE=bfloat16",
    ),
    "a model larger than the GPU": Fault(
        "memory",
        {"gpu_memory": GIB},
        PROBLEM,
        "no room for the steps",
        "LORIKEET_WEIGHT_DTYPE=lorikeet-demo=fp8, split .*TENSOR_PARALLEL.*GPU with more memory",
    ),
    "KV pages too few for one request": Fault(
        "memory",
        {"more": {"LORIKEET_KV_CACHE_MEMORY": "256KiB", "LORIKEET_MAX_CONTEXT": "1024"}},
        PROBLEM,
        "one sequence of 1024 needs",
        "LORIKEET_MAX_CONTEXT",
    ),
    "KV pages for less than the model's context": Fault(
        "memory",
        variable("KV_CACHE_MEMORY", "1MiB"),
        WARNING,
        "of the full 1,024",
        "LORIKEET_MAX_CONTEXT=",
    ),
    "no GPU to plan for": Fault(
        "memory", variable("DEVICE", "cuda"), WARNING, "no GPU here", "--gpu-memory 80GiB"
    ),
    "a host arena larger than the memory": Fault(
        "host memory",
        variable("ADAPTER_HOST_MEMORY", "40GiB"),
        PROBLEM,
        "host arenas 80.0 GiB",
        r"LORIKEET_ADAPTER_HOST_MEMORY=2\d{4}MiB",
    ),
    "KV pages on the host larger than its memory": Fault(
        "host memory",
        variable("KV_HOST_MEMORY", "40GiB"),
        PROBLEM,
        "KV pages 80.0 GiB",
        "a smaller LORIKEET_KV_HOST_MEMORY",
    ),
    "KV pages without host memory on the disk": Fault(
        "settings", variable("KV_DISK", "1GiB"), PROBLEM, "KV_DISK", "KV_HOST_MEMORY"
    ),
    "KV caches larger than the machine": Fault(
        "host memory",
        variable("KV_CACHE_MEMORY", "100%"),
        PROBLEM,
        "models",
        "a smaller LORIKEET_KV_CACHE_MEMORY",
    ),
    "a disk cache smaller than an adapter": Fault(
        "catalog",
        variable("ADAPTER_DISK", "64KiB"),
        WARNING,
        r"takes 672\.0 KiB, the disk cache has 64\.0 KiB",
        "LORIKEET_ADAPTER_DISK=3MiB",
    ),
    "a disk cache larger than the disk": Fault(
        "disk cache",
        variable("ADAPTER_DISK", "900000GiB"),
        PROBLEM,
        "free",
        r"LORIKEET_ADAPTER_DISK=\d+MiB",
    ),
    "KV pages on the disk larger than the disk": Fault(
        "disk cache",
        {"more": {"LORIKEET_KV_HOST_MEMORY": "1MiB", "LORIKEET_KV_DISK": "900000GiB"}},
        PROBLEM,
        "of them for KV pages",
        "a smaller LORIKEET_KV_DISK, or LORIKEET_CACHE_DIR",
    ),
    "a cache folder below a file": Fault(
        "disk cache",
        variable("CACHE_DIR", f"{__file__}/cache"),
        PROBLEM,
        "no folder",
        "LORIKEET_CACHE_DIR",
    ),
    "a folder to load from that is a file": Fault(
        "shared folder",
        variable("LOAD_FROM", __file__),
        WARNING,
        "LORIKEET_LOAD_FROM=.* is no folder",
        "mount",
    ),
    "an audit stream in a folder that is none": Fault(
        "audit stream",
        variable("AUDIT_LOG", f"{__file__}/audit"),
        PROBLEM,
        "LORIKEET_AUDIT_LOG=.* cannot be written",
        "LORIKEET_AUDIT_LOG=stdout",
    ),
    "an identity provider that is away": Fault(
        "identity provider",
        variable("OIDC", "issuer=https://id,audience=lorikeet,jwks=http://127.0.0.1:9/keys"),
        WARNING,
        "http://127.0.0.1:9/keys cannot be read",
        "jwks in LORIKEET_OIDC",
    ),
    "an FP8 cache on GPUs that have no FP8": Fault(
        "gpus",
        {
            "cuda": Cuda((A100,) * 2, (13, 0), (13, 0)),
            "more": {"LORIKEET_KV_DTYPE": "fp8"},
        },
        PROBLEM,
        "NVIDIA A100 is older than Ada",
        "LORIKEET_KV_DTYPE=auto",
    ),
    "FP8 weights on GPUs that have no FP8": Fault(
        "gpus",
        {
            "cuda": Cuda((A100,) * 2, (13, 0), (13, 0)),
            "more": {"LORIKEET_WEIGHT_DTYPE": "fp8"},
        },
        PROBLEM,
        "NVIDIA A100 is older than Ada",
        "LORIKEET_WEIGHT_DTYPE=auto",
    ),
    "fewer GPUs than engines": Fault(
        "gpus", gpus(1), PROBLEM, "1 .NVIDIA H100., 2 needed", "LORIKEET_REPLICAS=1"
    ),
    "fewer GPUs than replicas of two": Fault(
        "gpus", gpus(2, tensor_parallel="2"), PROBLEM, "4 needed", "LORIKEET_REPLICAS=1"
    ),
    "fewer GPUs than one replica has": Fault(
        "gpus",
        gpus(1, tensor_parallel="2", replicas="1"),
        PROBLEM,
        "2 needed: LORIKEET_TENSOR_PARALLEL for each",
        "in one machine: lower LORIKEET_TENSOR_PARALLEL",
    ),
    "GPUs of one replica that are not joined": Fault(
        "gpus",
        {
            "cuda": Cuda((H100,) * 2, (13, 0), (13, 0), peers=False),
            "more": {"LORIKEET_TENSOR_PARALLEL": "2", "LORIKEET_REPLICAS": "1"},
        },
        WARNING,
        "no peer access to each other's memory",
        "NVLink",
    ),
    "fewer GPUs than there may be engines": Fault(
        "gpus",
        gpus(2, max_replicas="4"),
        WARNING,
        "4 when replicas scale up",
        "LORIKEET_MAX_REPLICAS=2",
    ),
    "an old driver": Fault(
        "gpus",
        {"cuda": Cuda((), (13, 0), (12, 4)), "more": {"LORIKEET_DEVICE": "cuda"}},
        PROBLEM,
        r"the driver supports CUDA 12\.4, torch is built for 13\.0",
        "update the NVIDIA driver",
    ),
    "a GPU, and torch for the CPU": Fault(
        "gpus", {"cuda": Cuda((), None, (13, 0))}, PROBLEM, "built for the CPU", "build for CUDA"
    ),
    "no attention kernels": Fault(
        "kernels", gpus(2), PROBLEM, "flashinfer-python is not installed", r"\.\[cuda\]"
    ),
    "too little shared memory": Fault(
        "limits",
        {"host": replace(HOST, shm=64 << 20)},
        WARNING,
        r"64\.0 MiB",
        r"--shm-size=11g",
    ),
    "too few open files": Fault(
        "limits",
        {"host": replace(HOST, open_files=1024)},
        WARNING,
        "1024 per process",
        "ulimit -Hn",
    ),
    "an arena smaller than an adapter": Fault(
        "catalog",
        variable("ADAPTER_HOST_MEMORY", "16KiB"),
        PROBLEM,
        "the host arena has",
        r"LORIKEET_ADAPTER_HOST_MEMORY=\d+MiB",
    ),
    "an arena smaller than the parts of an adapter that two GPUs share": Fault(
        "catalog",
        {"more": {"LORIKEET_ADAPTER_HOST_MEMORY": "1MiB", "LORIKEET_TENSOR_PARALLEL": "2"}},
        PROBLEM,
        "for each of 2 GPUs, the host arena has",
        r"LORIKEET_ADAPTER_HOST_MEMORY=\d+MiB",
    ),
    "a rank that is not allowed": Fault(
        "catalog", variable("MAX_RANK", "2"), PROBLEM, "one has rank", "LORIKEET_MAX_RANK="
    ),
    "a base model that was renamed": Fault(
        "catalog",
        variable("BASE_MODELS", "other=demo/model"),
        WARNING,
        "for lorikeet-demo, which is not served",
        "LORIKEET_BASE_MODELS",
    ),
    "a stranger's admin key": Fault(
        "catalog", variable("ADMIN_KEY", "lk_x"), WARNING, "LORIKEET_ADMIN_KEY", "lorikeet init"
    ),
    "a store that is not there": Fault(
        "catalog",
        variable("CATALOG", "s3://no-such-bucket-here/x"),
        PROBLEM,
        "'no-such-bucket-here' does not exist",
        "LORIKEET_CATALOG",
    ),
    "no catalog folder": Fault(
        "catalog", variable("CATALOG", "/nowhere/catalog"), PROBLEM, "no catalog", "lorikeet init"
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_with_its_fix(patient: Patient, name: str) -> None:
    planted = PLANTED[name]
    (fault,) = faults(patient.examined(planted.checks, **planted.change))
    assert fault.severity is planted.severity
    assert re.search(planted.message, fault.message), fault
    assert re.search(planted.fix, f"{fault.message} {fault.fix}"), fault


def cut(file: Path) -> None:
    with file.open("r+b") as weights:
        weights.truncate(file.stat().st_size // 2)


def leave_a_note(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4883952\n")


def another_family(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "gemma"}))


def unknown_rope(file: Path) -> None:
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "xpos", "rope_theta": 10_000.0, "factor": 4.0}
    file.write_text(json.dumps(config))


def rope_of_vllm(file: Path) -> None:
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9}
    file.write_text(json.dumps(config))


def own_head(file: Path) -> None:
    """Store a separate lm_head, though config.json ties it to the embeddings."""
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, file)


def no_modules(file: Path) -> None:
    file.write_text("[]")


def too_hot(file: Path) -> None:
    file.write_text(json.dumps({"temperature": 2.5}))


@pytest.mark.parametrize(
    ("file", "plant", "severity", "found", "fix"),
    [
        ("model.safetensors", Path.unlink, PROBLEM, "does not exist", "incomplete: `hf download"),
        ("model.safetensors", cut, PROBLEM, "no whole safetensors", "incomplete: `hf download"),
        ("model.safetensors", leave_a_note, PROBLEM, "no whole safetensors", "lfs pull"),
        ("config.json", another_family, PROBLEM, "model_type='gemma'", "Llama, Mistral"),
        (
            "config.json",
            unknown_rope,
            PROBLEM,
            "rope_type='xpos'",
            "remove rope_.* from config.json",
        ),
        ("config.json", rope_of_vllm, PROBLEM, "attn_factor=0.9", "write attention_factor"),
        ("model.safetensors", own_head, PROBLEM, "trained lm_head", '"tie_word_embeddings": false'),
        ("tokenizer.json", Path.unlink, PROBLEM, "no tokenizer.json", "save_pretrained"),
        ("chat_template.jinja", Path.unlink, WARNING, "no chat template", r"chat_template\.jinja"),
        ("generation_config.json", too_hot, PROBLEM, "temperature: ", "GENERATION_CONFIG=none"),
        ("modules.json", no_modules, WARNING, "embeds no texts: modules.json", "remove the file"),
    ],
)
def test_a_faulty_model_folder_is_found_with_its_fix(
    patient: Patient,
    file: str,
    plant: Callable[[Path], None],
    severity: Severity,
    found: str,
    fix: str,
) -> None:
    plant(patient.model / file)
    (fault,) = faults(patient.examined("base models"))
    assert fault.severity is severity
    assert found in fault.message
    assert re.search(fix, fault.fix), fault


def test_an_unsupported_quantisation_is_found_with_its_fix(patient: Patient) -> None:
    (found,) = patient.examined("base models", **variable("WEIGHT_DTYPE", "nf4"))[:1]
    assert found.severity is OK
    path = patient.model / "config.json"
    config = json.loads(path.read_text())
    awq = {"quant_method": "awq", "bits": 3}
    path.write_text(json.dumps(config | {"quantization_config": awq}))
    (fault,) = faults(patient.examined("base models"))
    assert "quantization_config.bits=3: want 4" in fault.message
    assert "NF4, AWQ, GPTQ or W4A16" in fault.fix


def in_awq(folder: Path) -> None:
    """Make the model's linears those of an AWQ checkpoint."""
    names, tensors = linears(folder)
    for name in names:
        d_out, d_in = tensors.pop(name).shape
        of_groups = d_in // 32, d_out
        q, zeros = torch.full((d_in, d_out), 9), torch.full(of_groups, 8)
        scales = torch.full(of_groups, 0.01).half()
        tensors |= awq(name.removesuffix(".weight"), q, zeros, scales)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / SINGLE)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": AWQ}))


def test_weights_that_stay_packed_are_shown_and_planned_for(patient: Patient) -> None:
    in_awq(patient.model)
    on = gpus(2, weight_dtype="packed")
    found = patient.examined("base models", **on)
    assert "linears awq that stay packed, served as bfloat16" in found[0].message
    floats, packed = (patient.examined("memory", **each)[0].message for each in (gpus(2), on))
    sizes = [
        float(re.search(r"weights ([\d.]+) MiB", said)[1])  # type: ignore[index]
        for said in (floats, packed)
    ]
    assert sizes[1] < 0.7 * sizes[0]


def test_weights_that_stay_packed_on_gpus_older_than_ampere_are_found(patient: Patient) -> None:
    on_old = {"cuda": Cuda((T4,) * 2, (13, 0), (13, 0))}
    found = faults(patient.examined("gpus", **on_old | variable("WEIGHT_DTYPE", "packed")))
    said = [(fault.message, fault.fix) for fault in found if "4 bits" in fault.message]
    (fault,) = said
    assert fault == (
        "Tesla T4 is older than Ampere and has no products of 4 bits",
        "LORIKEET_WEIGHT_DTYPE=auto",
    )


@pytest.mark.parametrize("served", ["auto", "packed"])
def test_too_little_memory_for_floats_of_4_bits_suggests_to_pack_them(
    patient: Patient, served: str
) -> None:
    in_awq(patient.model)
    change = {"gpu_memory": GIB, "more": {"LORIKEET_WEIGHT_DTYPE": served}}
    (fault,) = faults(patient.examined("memory", **change))
    assert ("WEIGHT_DTYPE=lorikeet-demo=packed" in fault.fix) is (served == "auto")
    assert "fp8" not in fault.fix


@pytest.mark.parametrize("change", [in_awq, lambda _: None])
def test_too_little_memory_on_gpus_older_than_ampere_suggests_no_smaller_weights(
    patient: Patient, change: Callable[[Path], None]
) -> None:
    change(patient.model)
    small = replace(T4, free=GIB)
    (fault,) = faults(patient.examined("memory", cuda=Cuda((small,) * 2, (13, 0), (13, 0))))
    assert "smaller model" in fault.fix
    assert "WEIGHT_DTYPE" not in fault.fix


def test_floats_that_are_to_stay_packed_are_found_with_their_fix(patient: Patient) -> None:
    (fault,) = faults(patient.examined("base models", **variable("WEIGHT_DTYPE", "packed")))
    assert "the checkpoint's linears are floats, which cannot stay packed" in fault.message
    assert fault.fix == "LORIKEET_WEIGHT_DTYPE=auto for it, or another folder"


def test_groups_that_no_linear_can_have_suggest_another_copy(patient: Patient) -> None:
    in_awq(patient.model)
    path = patient.model / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = AWQ | {"group_size": 48}
    path.write_text(json.dumps(config))
    (fault,) = faults(patient.examined("base models"))
    assert "cannot be cut into groups of 48 inputs" in fault.message
    assert fault.fix.startswith("choose a copy that is not quantised")


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def in_fp8(folder: Path) -> None:
    """Make the model's linears those of an FP8 checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.tensor(1.0)
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FP8}))


def test_an_fp8_checkpoint_on_gpus_without_fp8_is_found(patient: Patient) -> None:
    in_fp8(patient.model)
    on_old = {"cuda": Cuda((A100,) * 2, (13, 0), (13, 0))}
    fixes = [fault.fix for fault in faults(patient.examined("gpus", **on_old))]
    assert fixes == ["for lorikeet-demo choose a copy that is not in FP8"]
    (fault,) = faults(patient.examined("memory", gpu_memory=GIB))
    assert "WEIGHT_DTYPE" not in fault.fix, "it is in FP8 already"


def test_fp8_weights_in_another_dtype_than_bfloat16_are_found(patient: Patient) -> None:
    found = patient.examined("base models", **gpus(2, dtype="float16", weight_dtype="fp8"))
    (fault,) = (finding for finding in found if finding.severity is PROBLEM)
    assert fault.message == "the linears are served in FP8, which needs bfloat16, not float16"
    assert fault.fix == "LORIKEET_DTYPE=bfloat16"


def test_a_quantised_copy_of_another_layout(patient: Patient) -> None:
    in_fp8(patient.model)
    path = patient.model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(3)
    save_file(tensors, path)
    (fault,) = faults(patient.examined("base models"))
    assert "up_proj.weight_scale is F32 [3]: want" in fault.message
    assert re.search("incomplete: `hf download.*or choose a copy that is not quant", fault.fix)


def test_a_mixture_of_experts_that_is_not_quantised_as_fp8(patient: Patient) -> None:
    path = patient.model / "config.json"
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    more = {"model_type": "mixtral", "quantization_config": nf4}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    (fault,) = faults(patient.examined("base models"))
    assert "quantization_config='nf4': want experts of floats or of FP8" in fault.message
    assert fault.fix == "choose a copy that is not quantised, or in another format"


@pytest.mark.parametrize("rounding", ["nf4", "fp8"])
def test_the_format_that_linears_are_rounded_to_is_shown(patient: Patient, rounding: str) -> None:
    found = patient.examined("base models", **variable("WEIGHT_DTYPE", rounding))
    assert f"linears rounded to {rounding}, served as float32" in found[0].message


def test_the_memory_of_an_fp8_cache_is_planned(patient: Patient) -> None:
    (auto,) = patient.examined("memory", **gpus(2))
    (fp8,) = patient.examined("memory", **gpus(2, kv_dtype="fp8"))
    (few,), (many,) = (
        re.findall(r"KV [\d.]+ GiB(?: in FP8)? for ([\d,]+) tokens", found.message)
        for found in (auto, fp8)
    )
    assert int(many.replace(",", "")) == pytest.approx(2 * int(few.replace(",", "")), rel=0.001)
    assert "in FP8" in fp8.message
    assert "in FP8" not in auto.message


def test_memory_is_planned_for_each_gpu_of_a_tensor_parallel_model(patient: Patient) -> None:
    (alone,) = patient.examined("memory", **gpus(2))
    (shared,) = patient.examined("memory", **gpus(4, tensor_parallel="2"))
    weights = [
        float(re.search(r"weights ([\d.]+) MiB", found.message)[1]) for found in (alone, shared)
    ]
    assert 0.5 * weights[0] < weights[1] < 0.8 * weights[0]
    assert "on each cuda of 2 that share it: " in shared.message
    assert "share" not in alone.message


def test_heads_that_gpus_cannot_divide_are_not_reported_as_lack_of_memory(patient: Patient) -> None:
    file = patient.model / "config.json"
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    file.write_text(json.dumps({**json.loads(file.read_text()), **heads}))
    assert patient.examined("memory", **gpus(8, tensor_parallel="4")) == []
    (fault,) = faults(patient.examined("base models", **gpus(8, tensor_parallel="4")))
    assert fault.severity is PROBLEM
    assert "num_attention_heads=6 cannot be shared evenly by 4 processes" in fault.message
    assert "LORIKEET_TENSOR_PARALLEL" in str(fault.fix)


def test_latents_without_attention_kernels_are_named_where_there_is_a_gpu(
    patient: Patient, tmp_path: Path
) -> None:
    config = LATENT["glm4_moe_lite"] | {"vocab_size": 262}
    for file in save_all({"tiny": config}, tmp_path)["tiny"].glob("*.safetensors"):
        shutil.copy(file, patient.model)
    shutil.copy(tmp_path / "tiny" / "config.json", patient.model)
    assert faults(patient.examined("base models")) == []
    (fault,) = faults(patient.examined("base models", **gpus(2)))
    assert fault.severity is PROBLEM
    assert "kv_lora_rank=36, qk_rope_head_dim=8: GPU kernels take" in fault.message


def test_heads_without_attention_kernels_are_named_where_there_is_a_gpu(patient: Patient) -> None:
    file = patient.model / "config.json"
    halves = {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    file.write_text(json.dumps({**json.loads(file.read_text()), **halves}))
    assert faults(patient.examined("base models")) == []
    (fault,) = faults(patient.examined("base models", **gpus(2)))
    assert fault.severity is WARNING
    assert "heads of 64 to 512, and these have 32" in fault.message
    assert fault.fix == "choose a model with such heads"


def test_old_and_missing_packages_are_found(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"ray": "2.59.0", "torch": None}
    known = software._version
    monkeypatch.setattr(software, "_version", lambda name: installed.get(name, known(name)))
    (fault,) = faults(patient.examined("versions"))
    assert fault.severity is PROBLEM
    assert "ray is 2.59.0: want ==2.60.*" in fault.message
    assert "torch is not installed" in fault.message
    assert "pip install" in fault.fix


def test_a_readable_folder_to_load_from_is_no_fault(patient: Patient) -> None:
    (found,) = patient.examined("shared folder", **variable("LOAD_FROM", str(patient.model)))
    assert faults([found]) == []
    assert patient.examined("shared folder") == []


def test_an_audit_stream_and_a_providers_keys_are_no_faults(
    patient: Patient, tmp_path: Path
) -> None:
    for name in (str(tmp_path / "audit"), "stdout", "http://collector:4318"):
        assert faults(patient.examined("audit stream", **variable("AUDIT_LOG", name))) == []
    with running_issuer() as (_, url):
        issuer = variable("OIDC", f"issuer=https://id,audience=lorikeet,jwks={url}")
        (found,) = patient.examined("identity provider", **issuer)
    assert faults([found]) == []
    assert found.message == "keys of https://id: 1"


def test_missing_compilers_are_found(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.doctor.software._unmet", lambda requirement: None)
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CC": "", "CXX": ""}
    on_gpus = gpus(2) | {"more": bare}
    (fault,) = faults(patient.examined("kernels", **on_gpus))
    assert fault.severity is PROBLEM
    assert "no C compiler, no C++ compiler" in fault.message
    assert "g++" in fault.fix
    kernel = tmp_path / ".cache" / "flashinfer" / "0.6" / "90a" / "cached_ops" / "k" / "k.so"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    (fault,) = faults(patient.examined("kernels", **on_gpus))
    assert fault.message.endswith("no C compiler")


@pytest.mark.parametrize("taken", ["public listener", "admin listener"])
def test_a_taken_port_is_found(patient: Patient, taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if taken == "admin listener":
            change = variable("ADMIN_ADDRESS", f"127.0.0.1:{port}")
        else:
            change = {"http_port": port}
        found = [f for f in faults(patient.examined("ports", **change)) if f.severity is PROBLEM]
    (fault,) = found
    assert f"{port}, for the {taken}" in fault.message
    assert ("LORIKEET_ADMIN_ADDRESS" in fault.fix) is (taken == "admin listener")
    assert f":{port}" in fault.fix


@pytest.mark.parametrize(
    ("host", "why"), [("192.0.2.1", "Cannot assign"), ("nowhere.invalid", "[Nn]ame")]
)
def test_an_admin_address_of_another_machine_is_found(
    patient: Patient, host: str, why: str
) -> None:
    change = variable("ADMIN_ADDRESS", f"{host}:{free_port()}")
    (fault,) = (f for f in faults(patient.examined("ports", **change)) if f.severity is PROBLEM)
    assert re.search(rf"LORIKEET_ADMIN_ADDRESS={re.escape(host)}:\d+: .*{why}", fault.message)
    assert "an address of this machine" in fault.fix


def test_one_port_for_both_listeners_is_found(patient: Patient) -> None:
    port = free_port()
    change = variable("ADMIN_ADDRESS", f"127.0.0.1:{port}") | {"http_port": port}
    (fault,) = (f for f in faults(patient.examined("ports", **change)) if f.severity is PROBLEM)
    assert f"{port} is set for both the public and the admin listener" in fault.message
    assert "PORT" in fault.fix


def test_a_full_disk_is_not_advised_an_empty_cache(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    (fault,) = faults(patient.examined("disk cache"))
    assert (fault.severity, fault.fix) == (PROBLEM, "LORIKEET_CACHE_DIR on a larger disk")


def test_a_failing_check_does_not_stop_the_others(patient: Patient) -> None:
    findings = patient.examined("host memory", "limits", "versions", host=None)
    assert [finding.severity for finding in findings] == [OK, PROBLEM, PROBLEM]
    assert "the check failed" in findings[1].message


def test_contradictory_settings_are_reported_once(patient: Patient) -> None:
    names = ("settings", "base models", "memory", "host memory", "catalog")
    found = faults(patient.examined(*names, **variable("MAX_BATCH_TOKENS", "8")))
    assert [fault.check for fault in found] == ["settings"]


def test_rays_largest_message_holds_any_request_and_answer() -> None:
    assert LARGEST_MESSAGE >= 2 * MAX_JSON_BYTES
    longest_token_bytes = 150  # as JSON
    assert MOST_LOGPROBS * longest_token_bytes < LARGEST_MESSAGE


def test_a_bad_setting_still_runs_checks_that_need_no_settings(patient: Patient) -> None:
    findings = patient.examined(**variable("REPLICAS", "0"))
    assert {finding.check for finding in findings} == {"settings", "ray variables", "versions"}
