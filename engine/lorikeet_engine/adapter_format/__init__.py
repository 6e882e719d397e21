"""What an adapter's file looks like, and whether to let it in. Needs no torch.

A **blob** is one safetensors file: PEFT's tensors sorted by name, and under the header's
`__metadata__` one key, `lorikeet`, the canonical JSON of what matters of PEFT's config. Its SHA-256
is the adapter's digest.

`blob` makes one of a PEFT folder: `config` reduces adapter_config.json, with `targets` and
`expressions`; `trtllm` and `peft_folder` convert to such a folder. `spec` validates a blob by its
`header` against a base model's `shape`, whose linears are its family's (`families`); `image` checks
values and sizes. The gateway, the CLI and `residency` call it.
"""

from lorikeet_engine.adapter_format.blob import WEIGHTS_FILE, blob_digest, write_blob
from lorikeet_engine.adapter_format.config_json import read_json
from lorikeet_engine.adapter_format.expressions import CONFIG_FILE
from lorikeet_engine.adapter_format.families import FAMILIES, Family, Linear
from lorikeet_engine.adapter_format.header import TensorSpan
from lorikeet_engine.adapter_format.image import FLOAT32_MEMORY, AdapterMemory, check_values
from lorikeet_engine.adapter_format.peft_folder import Tensor, write_peft_folder
from lorikeet_engine.adapter_format.shape import BaseShape
from lorikeet_engine.adapter_format.spec import (
    ALIGNMENT,
    AdapterLimits,
    AdapterSpec,
    LinearLora,
    aligned,
    read_spec,
)
from lorikeet_engine.adapter_format.trtllm import has_pair, read_pair

__all__ = [
    "ALIGNMENT",
    "CONFIG_FILE",
    "FAMILIES",
    "FLOAT32_MEMORY",
    "WEIGHTS_FILE",
    "AdapterLimits",
    "AdapterMemory",
    "AdapterSpec",
    "BaseShape",
    "Family",
    "Linear",
    "LinearLora",
    "Tensor",
    "TensorSpan",
    "aligned",
    "blob_digest",
    "check_values",
    "has_pair",
    "read_json",
    "read_pair",
    "read_spec",
    "write_blob",
    "write_peft_folder",
]
