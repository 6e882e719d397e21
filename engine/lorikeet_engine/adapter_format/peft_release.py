"""The release of PEFT that trained an adapter, since earlier releases computed otherwise.

PEFT writes `peft_version` since 0.18. Before, adapter_config.json shows the release by its keys,
since PEFT writes each option that it knows. docs/adapters.md lists the differences.
"""

import re
from collections.abc import Mapping
from typing import Any

Release = tuple[int, int, int]
"""Version of PEFT, such as (0, 19, 1)."""

# The options that each release added; patch releases added none.
_ADDED_KEYS: tuple[tuple[Release, tuple[str, ...]], ...] = (
    ((0, 4, 0), ("auto_mapping", "layers_pattern", "layers_to_transform", "revision")),
    ((0, 6, 0), ("alpha_pattern", "rank_pattern")),
    ((0, 7, 0), ("loftq_config", "megatron_config", "megatron_core")),
    ((0, 8, 0), ("use_rslora",)),
    ((0, 9, 0), ("use_dora",)),
    ((0, 10, 0), ("layer_replication",)),
    ((0, 14, 0), ("eva_config", "exclude_modules", "lora_bias")),
    ((0, 15, 0), ("corda_config", "trainable_token_indices")),
    ((0, 16, 0), ("qalora_group_size", "use_qalora")),
    ((0, 17, 0), ("target_parameters",)),
)
_ADDED_WITH_THE_VERSION = ("alora_invocation_tokens", "arrow_config", "ensure_weight_tying")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:\.?(?:rc|post)\d+)?(?:\+.*)?")

SEPARATE_PATTERNS: Release = (0, 14, 0)
"""First release that looks up rank_pattern and alpha_pattern independently of each other."""
WHOLE_PATTERNS: Release = (0, 15, 0)
"""First release in which a pattern's key is matched as a whole, even if it has alternatives (a|b).

It is also the first in which a key can match a module name without a dot.
"""
SCALED_EMBEDDINGS: Release = (0, 18, 0)
"""First release that multiplies adapters of embeddings by the embeddings' own scale."""
LOST_BIASES: Release = (0, 7, 0)
"""First release that trains biases for bias="lora_only" and leaves them out of the file."""
SAVED_BIASES: Release = (0, 21, 0)
"""First release after LOST_BIASES that saves the biases that bias="lora_only" trains."""
EXPERTS_IN_QUESTION: Release = (0, 19, 0)
"""First release whose orientation of gpt-oss's experts depends on the release of transformers."""
EXPERTS_OUT_IN: Release = (0, 19, 1)
"""First release that takes the shape of experts' parameters as [experts, out, in]."""


def training_release(raw: Mapping[str, Any]) -> Release | None:
    """Return the release of PEFT that wrote a config; None if the config does not show it.

    Other tools' configs do not show it. Neither does a development version of PEFT up to 0.19.1
    (EXPERTS_OUT_IN), since it may lack what the release of this number has.

    raw: PEFT's config.
    """
    version = raw.get("peft_version")
    if version is not None:
        match = _VERSION.fullmatch(version) if isinstance(version, str) else None
        if match is None:
            begin = re.match(r"(\d{1,4})\.(\d{1,4})", str(version))
            found = (int(begin[1]), int(begin[2]), 0) if begin else (0, 0, 0)
            return found if found > EXPERTS_OUT_IN else None
        return int(match[1]), int(match[2]), int(match[3])
    if not raw.keys().isdisjoint(_ADDED_WITH_THE_VERSION):
        return None
    release = None
    for added_in, keys in _ADDED_KEYS:
        if not raw.keys() >= set(keys):
            break
        release = added_in
    return release


def is_before(raw: Mapping[str, Any], release: Release) -> bool:
    """Whether a release of PEFT earlier than `release` wrote a config.

    False if the config does not show its release.

    raw: PEFT's config.
    """
    found = training_release(raw)
    return found is not None and found < release
