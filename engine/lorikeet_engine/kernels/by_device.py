"""Choice between a package's two implementations of its operators, by device."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType


def by_device(package: str) -> Callable[[str], ModuleType]:
    """Return a function from a device type to a package's module for that device.

    The module is `fused` on CUDA, else `reference`, and is imported at the first call: a machine
    without a GPU may have no Triton.

    package: name of the package, with dots.
    """

    @cache
    def operators(device_type: str) -> ModuleType:
        return import_module(f"{package}.{'fused' if device_type == 'cuda' else 'reference'}")

    return operators
