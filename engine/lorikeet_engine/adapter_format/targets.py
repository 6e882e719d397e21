"""Which linears a PEFT config speaks of: its targets and its patterns, resolved as PEFT does."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lorikeet_engine.adapter_format.expressions import MAX_EXPRESSIONS, Expressions, bad_config
from lorikeet_engine.adapter_format.tensor_names import linears_of, locate_module

_ALL_LINEAR = "all-linear"
_MAX_LAYERS = 1_000

Selects = Callable[[str], bool]


def check_targets(raw: Mapping[str, Any], modules: Sequence[str], run: Expressions) -> None:
    """Check that the weights are for exactly the linears that the config targets.

    Layers after the last one with weights are not looked for: only the base model knows how many
    there are. Without target_modules nothing is said. Raises AdapterRejected.
    """
    linears = linears_of(modules)
    located = {module: locate_module(module, linears)[0] for module in modules}
    if raw.get("target_modules") is None:
        return
    targeted = _targeted(raw, run)
    layers = range(min(max(located.values()) + 1, _MAX_LAYERS))
    every = {linear.path(layer) for layer in layers for linear in linears}
    for module in sorted(every | set(located)):
        if targeted(module) and module not in located:
            raise bad_config(
                f"it selects {module}, but no weight is for it: the file is incomplete, or "
                "exclude_modules or layers_to_transform must leave it out",
                "target_modules",
            )
        if module in located and not targeted(module):
            raise bad_config(
                f"there are weights for {module}, which it leaves out", "target_modules"
            )


def resolve_pattern(
    raw: Mapping[str, Any], key: str, modules: Iterable[str], run: Expressions
) -> dict[str, Any]:
    """A pattern's value for each module that it matches: PEFT takes the first key that does.

    Raises AdapterRejected.
    """
    pattern = raw.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise bad_config("want an object", key)
    if len(pattern) > MAX_EXPRESSIONS:
        raise bad_config(f"{len(pattern)} entries: the limit is {MAX_EXPRESSIONS}", key)
    compiled = [
        (_ending(name), run.compile(rf"(.*\.)?({name})", key), value)
        for name, value in pattern.items()
    ]
    found = {}
    for module in modules:
        for ending, expression, value in compiled:
            if module.endswith(ending) and run.fullmatch(expression, module, key):
                found[module] = value
                break
    return found


def _ending(expression: str) -> str:
    """How all that it matches ends, if it is a plain name: PEFT may write one for each linear."""
    return expression.rpartition(".")[2] if re.fullmatch(r"[\w.]+", expression) else ""


def _targeted(raw: Mapping[str, Any], run: Expressions) -> Selects:
    targets = raw["target_modules"]
    excluded = _names(raw, "exclude_modules", run)
    if isinstance(targets, str):  # PEFT narrows an expression by no layers_to_transform
        every = targets.lower() == _ALL_LINEAR
        selected = (lambda _: True) if every else _names(raw, "target_modules", run)
        return lambda module: selected(module) and not excluded(module)
    named, in_layer = _names(raw, "target_modules", run), _layers(raw, run)
    return lambda module: named(module) and in_layer(module) and not excluded(module)


def _names(raw: Mapping[str, Any], key: str, run: Expressions) -> Selects:
    """Whether a module is named: by an expression, or by a list of ends of names."""
    value = raw.get(key)
    if isinstance(value, str) and value:
        expression = run.compile(value, key)
        return lambda module: run.fullmatch(expression, module, key)
    ends = set(_strings(value or [], key))
    return lambda module: not ends.isdisjoint(_ends(module))


def _ends(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[at:]) for at in range(len(parts))]


def _layers(raw: Mapping[str, Any], run: Expressions) -> Selects:
    """Whether a module is in layers_to_transform, counted under layers_pattern."""
    wanted = raw.get("layers_to_transform")
    wanted = [wanted] if type(wanted) is int else wanted
    if not wanted:
        return lambda _: True
    if not isinstance(wanted, list) or not all(type(layer) is int for layer in wanted):
        raise bad_config("want an integer or a list of integers", "layers_to_transform")
    given = raw.get("layers_pattern") or []
    names = _strings([given] if isinstance(given, str) else given, "layers_pattern")
    patterns = [run.compile(rf"(.*\.)?({name})", "layers_pattern") for name in names]
    layers = set(wanted)

    def selects(module: str) -> bool:
        layer = module.split(".")[2]  # model.layers.N
        before = module.partition(f".{layer}.")[0]
        known = not patterns or any(run.fullmatch(p, before, "layers_pattern") for p in patterns)
        return known and int(layer) in layers

    return selects


def _strings(value: Any, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad_config("want a text or a list of texts", key)
    if len(value) > MAX_EXPRESSIONS:
        raise bad_config(f"{len(value)} entries: the limit is {MAX_EXPRESSIONS}", key)
    return value
