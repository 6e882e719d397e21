"""What trainers call the linears of experts, and what blobs do.

Mixtral's old names are block_sparse_moe for mlp, and w1, w3 and w2 for gate_proj, up_proj and
down_proj. PEFT wraps a whole parameter, gate_up_proj or down_proj, for all experts at once.
"""

import re
from collections.abc import Collection

GATE, UP, GATE_UP, DOWN = "gate_proj", "up_proj", "gate_up_proj", "down_proj"
_NUMBER = "0|[1-9][0-9]{0,4}"
WRAPPED = re.compile(r"(.*\.experts)(\.base_layer)?")
NUMBERED = re.compile(rf"(.*\.experts)\.({_NUMBER})\.(\w+)")
PARAMETER = re.compile(rf"(.*\.experts)\.({GATE_UP}|{DOWN})")
_EXPERTS = re.compile(rf"(.*\.experts)\.(?:(?:{_NUMBER})\.)?(\w+)")
_OLD_LINEARS = {"w1": GATE, "w3": UP, "w2": DOWN}
_OLD_BLOCK, _BLOCK = ".block_sparse_moe.", ".mlp."


def is_of_experts(module: str) -> bool:
    """Whether a module, as a trainer saved it or as blobs call it, is of experts."""
    return _EXPERTS.fullmatch(module) is not None


def modern(module: str) -> str:
    """The name without Mixtral's old parts."""
    module = module.replace(_OLD_BLOCK, _BLOCK)
    before, dot, last = module.rpartition(".")
    return f"{before}{dot}{_OLD_LINEARS.get(last, last)}" if is_of_experts(module) else module


def linear_of(module: str) -> str:
    """A linear of a layer that a module is, for one expert or all, or that a parameter holds."""
    match = _EXPERTS.fullmatch(module)
    if match is None:
        return module
    return f"{match[1]}.{GATE if match[2] == GATE_UP else match[2]}"


def configured_names(path: str, given: Collection[str]) -> set[str]:
    """The names by which a config can mean a layer's linear, in the forms that the weights have.

    path: the linear's, as blobs call it. given: the modules with weights, as a trainer saved them.
    """
    if any(_OLD_BLOCK in module for module in given):
        path = path.replace(_BLOCK, _OLD_BLOCK)
    match = _EXPERTS.fullmatch(path)
    if match is None:
        return {path, f"{path}.weight"}
    experts, linear = match.groups()
    names = {f"{experts}.{DOWN if linear == DOWN else GATE_UP}"}
    forms = [(NUMBERED.fullmatch(module), module) for module in given if is_of_experts(module)]
    last_parts = {module.rpartition(".")[2] for _, module in forms}
    if not last_parts.isdisjoint(_OLD_LINEARS):
        linear = next(old for old, name in _OLD_LINEARS.items() if name == linear)
    numbers = [int(number[2]) for number, _ in forms if number]
    if numbers or not forms:
        count = min(max(numbers, default=0), len(numbers)) + 1
        return names | {f"{experts}.{number}.{linear}" for number in range(count)}
    return names if last_parts <= {GATE_UP, DOWN} else names | {f"{experts}.{linear}"}
