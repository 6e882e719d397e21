"""Each operator has a function of its name on CUDA, which takes the same parameters."""

import dis
import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from lorikeet_engine import kernels
from lorikeet_engine.kernels.by_device import by_device

OPERATORS = {
    f"{package}.{name}": operator
    for package in (
        *("delta_net", "fp8", "latents", "log_softmax", "mamba", "masks", "moe", "penalties"),
        *("pointwise", "sampling", "w4a16"),
    )
    for name, operator in vars(import_module(f"{kernels.__name__}.{package}")).items()
    if hasattr(operator, "__wrapped__") and operator.__module__.endswith(f".{package}")
}


def test_the_operators_are_found():
    assert len(OPERATORS) >= 34


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_and_its_kernel_take_the_same_parameters(name):
    operator = OPERATORS[name]
    fused = getattr(import_module(f"{operator.__module__}.fused"), operator.__name__)
    ours, theirs = (inspect.signature(each).parameters for each in (operator, fused))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_first_argument_has_a_device(name):
    first = next(iter(get_type_hints(OPERATORS[name]).values()))
    assert all(hasattr(kind, "device") for kind in get_args(first) or (first,))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_definition_calls_no_operator(name):
    """On a GPU it would run the kernel that tests compare with it."""
    definition = inspect.unwrap(OPERATORS[name])
    loads = (each for each in dis.get_instructions(definition) if each.opname == "LOAD_GLOBAL")
    used = [definition.__globals__.get(each.argval) for each in loads]
    assert not any(each is operator for each in used for operator in OPERATORS.values())


def test_the_first_arguments_device_chooses(monkeypatch):
    def product(x, factor):
        return x.value * factor

    fused = SimpleNamespace(product=lambda x, factor: -x.value * factor)
    monkeypatch.setattr(
        "lorikeet_engine.kernels.by_device._imported", {"some.package.fused": fused}.get
    )
    product.__module__ = "some.package"
    operator = by_device(product)
    on_cpu, on_cuda = (
        SimpleNamespace(value=2, device=SimpleNamespace(type=kind)) for kind in ("cpu", "cuda")
    )
    assert (operator(on_cpu, 3), operator(on_cuda, factor=3)) == (6, -6)
