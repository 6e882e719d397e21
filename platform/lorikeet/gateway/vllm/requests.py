"""Paths and bodies of vLLM's endpoints for trainers."""

from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field

from lorikeet.gateway.body import Body

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
QUESTIONS = ("/server_info", "/get_world_size", "/is_paused")
NO_OPS = ("/pause", "/resume", "/reset_prefix_cache")
REFUSED = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/collective_rpc", "/sleep", "/wake_up"),
)
PATHS = frozenset({*QUESTIONS, *NO_OPS, *REFUSED})
"""Paths outside /v1, which the tenants' listener passes on."""


class LoadRequest(Body):
    """Body of a request to load an adapter, with vLLM's fields.

    lora_name: name of the adapter, with or without the key's tenant.
    lora_path: absolute path of the adapter's folder.
    load_inplace: replace an adapter of this name that another key loaded or that is registered.
    """

    dropped: ClassVar[Collection[str]] = {"is_3d_lora_weight"}  # files show it

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(Body):
    """Body of a request to unload an adapter, with vLLM's fields.

    lora_name: name of the adapter, with or without the key's tenant.
    """

    dropped: ClassVar[Collection[str]] = {"lora_int_id"}

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
