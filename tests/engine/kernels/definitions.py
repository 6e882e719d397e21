"""Operators as their packages define them in torch, on any device."""

from inspect import unwrap
from types import ModuleType, SimpleNamespace


def in_torch(package: ModuleType) -> SimpleNamespace:
    """Return the package's names, with the torch definition of each operator."""
    return SimpleNamespace(
        **{name: unwrap(it) if callable(it) else it for name, it in vars(package).items()}
    )
