"""The adapter file format, and the checks that an adapter must pass. Needs no torch.

A **blob** is one safetensors file: PEFT's tensors sorted by name, and under the header's
`__metadata__` the key `lorikeet`, with the canonical JSON of those parts of PEFT's config that
affect the results. The SHA-256 of the blob is the adapter's digest.

An adapter is checked at three trust boundaries, none of which relies on the one before. The CLI and
the Python client make a blob from a trainer's folder (`write_blob`), the gateway checks uploaded
and pushed blobs (`read_spec`, `check_values`), and each replica checks a blob again before it packs
the blob (`read_spec`). Regular expressions of a config run at the first boundary only, in a child
process.

    trainer's folder → blob     `blob`, from `saved_weights` (files), `tensor_names` (their names),
                                `lora_config` (adapter_config.json, with `targets`,
                                `expressions` and `peft_release`), `experts`, `joined`,
                                `token_rows`, `score_head`, `embedding_config` and
                                `vectors`;
                                `mlx` reads MLX's folders, and `trtllm` converts TensorRT-LLM's
                                to PEFT's
    blob → checked adapter      `spec`, from `header` and against the base model's `shape`;
                                `values` checks the values, `adapter_memory` the sizes
    base model                  `base_config` (config.json), `families` (their linears),
                                `base_names`, `base_quantization`; `base_copies` describes copies
                                of the base model's matrices in trainers' folders
"""

from lorikeet_engine.adapter_format.adapter_memory import FLOAT32_MEMORY, AdapterMemory
from lorikeet_engine.adapter_format.base_config import decoder_config, read_config, read_json
from lorikeet_engine.adapter_format.base_copies import (
    DIGEST_BYTES,
    BaseCopy,
    WholeModule,
    base_copies,
    keep_rows,
    row_digests,
    whole_modules,
)
from lorikeet_engine.adapter_format.base_names import (
    is_fp8_copy,
    is_nf4_copy,
    last_part,
    same_model,
    unquantised_name,
)
from lorikeet_engine.adapter_format.base_quantization import (
    Quantization,
    QuantizedLinears,
    is_nf4,
    quantized_linears,
    served_quantization,
)
from lorikeet_engine.adapter_format.blob import (
    Tensor,
    blob_digest,
    trained_on,
    write_blob,
    write_peft_folder,
)
from lorikeet_engine.adapter_format.embedding_config import EMBEDDING_FILES, read_embedder
from lorikeet_engine.adapter_format.expressions import CONFIG_FILE
from lorikeet_engine.adapter_format.families import (
    FAMILIES,
    OUTER_MODULES,
    Family,
    LayerNorms,
    Linear,
    QkNormKind,
)
from lorikeet_engine.adapter_format.header import TensorSpan
from lorikeet_engine.adapter_format.mlx import MLX_WEIGHTS_FILE
from lorikeet_engine.adapter_format.saved_weights import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    WEIGHTS_FILE,
    pickled_weights,
    refuse_added_tokens,
    shard_names,
)
from lorikeet_engine.adapter_format.score_head import base_head
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.spec import (
    ALIGNMENT,
    AdapterLimits,
    AdapterSpec,
    LinearLora,
    aligned,
    read_spec,
)
from lorikeet_engine.adapter_format.token_rows import MAX_LISTED
from lorikeet_engine.adapter_format.trtllm import has_trtllm_pair, read_trtllm_pair
from lorikeet_engine.adapter_format.values import SCAN_ALIGNMENT, ValueScan, check_values

__all__ = [
    "ALIGNMENT",
    "CONFIG_FILE",
    "DIGEST_BYTES",
    "EMBEDDING_FILES",
    "FAMILIES",
    "FLOAT32_MEMORY",
    "INDEX_FILE",
    "MAX_INDEX_BYTES",
    "MAX_LISTED",
    "MLX_WEIGHTS_FILE",
    "OUTER_MODULES",
    "SCAN_ALIGNMENT",
    "WEIGHTS_FILE",
    "AdapterLimits",
    "AdapterMemory",
    "AdapterSpec",
    "BaseCopy",
    "BaseShape",
    "Family",
    "LayerNorms",
    "Linear",
    "LinearLora",
    "QkNormKind",
    "Quantization",
    "QuantizedLinears",
    "Tensor",
    "TensorSpan",
    "ValueScan",
    "WholeModule",
    "aligned",
    "base_copies",
    "base_head",
    "blob_digest",
    "check_values",
    "decoder_config",
    "has_trtllm_pair",
    "is_fp8_copy",
    "is_nf4",
    "is_nf4_copy",
    "keep_rows",
    "last_part",
    "pickled_weights",
    "quantized_linears",
    "read_config",
    "read_embedder",
    "read_json",
    "read_spec",
    "read_trtllm_pair",
    "refuse_added_tokens",
    "row_digests",
    "same_model",
    "served_quantization",
    "shard_names",
    "trained_on",
    "unquantised_name",
    "whole_modules",
    "write_blob",
    "write_peft_folder",
]
