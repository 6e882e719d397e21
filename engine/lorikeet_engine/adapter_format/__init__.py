"""What an adapter's file looks like, and whether to let it in. Needs no torch.

A **blob** is one safetensors file: PEFT's tensors sorted by name, and under the header's
`__metadata__` one key, `lorikeet`, the canonical JSON of what matters of PEFT's config. Its SHA-256
is the adapter's digest.

`blob` makes one of a PEFT folder: `saved_weights` reads its tensors, whose names `tensor_names`
understands, and `lora_config` reduces adapter_config.json, with `targets` and `expressions`, which
runs those of strangers in a process (`expression_child`); `mlx` reads MLX's folders, `trtllm`
converts to PEFT's. `base_copies` describes what trainers save of the base model itself,
`token_rows` the rows of tokens that were trained. `base_names` says which names are of one base
model, `base_quantization` how its linears are stored. `spec` validates a blob by its `header`
against a base model's `shape`, whose linears are its family's (`families`) and whose config.json
`base_config` reads; `values` checks values and `image` sizes. The gateway, the CLI and `residency`
call it.
"""

from lorikeet_engine.adapter_format.adapter_memory import FLOAT32_MEMORY, AdapterMemory
from lorikeet_engine.adapter_format.base_config import decoder_config, read_config, read_json
from lorikeet_engine.adapter_format.base_copies import BaseCopy, base_copies
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
    refuse_added_tokens,
    shard_names,
)
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.spec import (
    ALIGNMENT,
    AdapterLimits,
    AdapterSpec,
    LinearLora,
    aligned,
    read_spec,
)
from lorikeet_engine.adapter_format.trtllm import has_trtllm_pair, read_trtllm_pair
from lorikeet_engine.adapter_format.values import SCAN_ALIGNMENT, ValueScan, check_values

__all__ = [
    "ALIGNMENT",
    "CONFIG_FILE",
    "FAMILIES",
    "FLOAT32_MEMORY",
    "INDEX_FILE",
    "MAX_INDEX_BYTES",
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
    "aligned",
    "base_copies",
    "blob_digest",
    "check_values",
    "decoder_config",
    "has_trtllm_pair",
    "is_fp8_copy",
    "is_nf4",
    "is_nf4_copy",
    "last_part",
    "quantized_linears",
    "read_config",
    "read_json",
    "read_spec",
    "read_trtllm_pair",
    "refuse_added_tokens",
    "same_model",
    "served_quantization",
    "shard_names",
    "trained_on",
    "unquantised_name",
    "write_blob",
    "write_peft_folder",
]
