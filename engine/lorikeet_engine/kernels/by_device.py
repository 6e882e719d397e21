"""Choice between an operator's two implementations, by device."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """Return an operator that runs a Triton kernel on CUDA, and `reference` on other devices.

    The kernel's function has the name and the parameters of `reference`, and is in the module
    `fused` of its package. The module is imported at the first call on CUDA: a machine without a
    GPU may have no Triton. The device is the attribute `device` of the first argument.
    """
    name, module = reference.__name__, f"{reference.__module__}.fused"

    @wraps(reference)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if first.device.type != "cuda":
            return reference(*args, **kwargs)
        result: R = getattr(_imported(module), name)(*args, **kwargs)
        return result

    return operator


@cache
def _imported(module: str) -> ModuleType:
    return import_module(module)
