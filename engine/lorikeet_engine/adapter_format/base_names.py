"""Comparison of base models' names: copies of one model differ in owner and in quantisation."""

import re

# In the Hub's cache, models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f2….
_SNAPSHOT = re.compile(r"(?:^|/)models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+$")
_FP8 = re.compile(r"-fp8(?:-(?:dynamic|block|kv))?$", re.IGNORECASE)
_META = re.compile(r"^meta-(?=llama-)")  # of Llama 3 and 3.1, under either name
_QUANTISED = re.compile(rf"-(?:unsloth-)?bnb-4bit$|-[468]bit$|{_FP8.pattern}", re.IGNORECASE)


def last_part(name: str) -> str:
    """Return the name without owner or folder: meta-llama/Llama-3.1-8B → Llama-3.1-8B.

    The name may be a path, also a Windows path, or a path in the cache of Hugging Face's Hub or of
    ModelScope, which writes ___ for each dot.
    """
    name = name.replace("\\", "/").rstrip("/")
    snapshot = _SNAPSHOT.search(name)
    return (snapshot[1] if snapshot else name.rpartition("/")[2]).replace("___", ".")


def unquantised_name(name: str) -> str:
    """Return the name of the model that a quantised copy was made from.

    unsloth/Llama-3.1-8B-bnb-4bit → Llama-3.1-8B. For other models, return the last part of the
    name. Knows the endings of Unsloth's and MLX's copies, and of FP8 copies; not of AWQ models,
    whose linears' inputs are scaled differently.
    """
    return _QUANTISED.sub("", last_part(name))


def is_nf4_copy(name: str) -> bool:
    """Whether a model's name says that it is a copy in bitsandbytes' NF4, as Unsloth names such
    copies.
    """
    return name.lower().endswith("bnb-4bit")


def is_fp8_copy(name: str) -> bool:
    """Whether a model's name says that it is an FP8 copy, as Qwen and Red Hat name such copies."""
    return _FP8.search(last_part(name)) is not None


def same_model(name: str, other: str) -> bool:
    """Whether two names are of the same model or of quantised copies of it."""
    one, another = (_META.sub("", unquantised_name(each).casefold()) for each in (name, other))
    return one == another
