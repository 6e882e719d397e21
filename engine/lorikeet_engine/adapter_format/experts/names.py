"""Names of the linears of experts, in trainers' files and in blobs.

Mixtral's old names are block_sparse_moe for mlp, and w1, w3 and w2 for gate_proj, up_proj and
down_proj. PEFT wraps a whole parameter, gate_up_proj or down_proj, for all experts at once;
Nemotron's experts, which have no gate, have up_proj instead of gate_up_proj. Unsloth
has lists of linears, gate_up_projs and down_projs, for gpt-oss in four bits.
"""

import re
from collections.abc import Collection

GATE, UP, GATE_UP, DOWN = "gate_proj", "up_proj", "gate_up_proj", "down_proj"
_NUMBER = "0|[1-9][0-9]{0,4}"
WRAPPED = re.compile(r"(.*\.experts)(\.base_layer)?")
NUMBERED = re.compile(rf"(.*\.experts)\.({_NUMBER})\.(\w+)")
GATE_UPS, DOWNS = f"{GATE_UP}s", f"{DOWN}s"
LISTED = re.compile(rf"(.*\.experts)\.({GATE_UPS}|{DOWNS})\.({_NUMBER})")
PARAMETER = re.compile(rf"(.*\.experts)\.({GATE_UP}|{DOWN}|(?<=\.mixer\.experts\.){UP})")
_EXPERTS = re.compile(rf"(.*\.experts)\.(?:(?:{_NUMBER})\.)?(\w+)")
_LINEARS = {GATE_UP: GATE, GATE_UPS: GATE, DOWNS: DOWN}
_OLD_LINEARS = {"w1": GATE, "w3": UP, "w2": DOWN}
_OLD_ROUTER = ".mlp.router.layer"  # Granite's
_OLD_BLOCK, _BLOCK = ".block_sparse_moe.", ".mlp."


def experts_kind(*, clamped: bool) -> str:
    """Return "gpt-oss" or "another base model": their experts' parameters differ in orientation.

    clamped: whether the base model is gpt-oss.
    """
    return "gpt-oss" if clamped else "another base model"


def is_of_experts(module: str) -> bool:
    """Whether a module belongs to experts. Its name may be the trainer's or a blob's."""
    return (_EXPERTS.fullmatch(module) or LISTED.fullmatch(module)) is not None


def is_listed(module: str) -> bool:
    """Whether a module, named as in blobs (stored adapters), is of one of Unsloth's lists of
    experts' linears, gate_up_projs and down_projs.
    """
    match = NUMBERED.fullmatch(module)
    return match is not None and match[3] in (GATE_UPS, DOWNS)


def first_parameter(experts: str) -> str:
    """Return the other parameter of experts than down_proj: gate_up_proj, or up_proj without gates.

    experts: path of the module that contains a layer's experts.
    """
    return UP if experts.endswith(".mixer.experts") else GATE_UP


def experts_of(module: str) -> str:
    """Return the path that ends in `.experts`, given a module below it: `….mlp.experts` for
    `….mlp.experts.3.gate_proj`.

    Any other path is returned unchanged. Configs of prime-rl, a trainer, target `….experts`
    itself.
    """
    match = _EXPERTS.fullmatch(module)
    return match[1] if match else module


def modern(module: str) -> str:
    """Replace Mixtral's and Unsloth's names in a module's name by the current ones.

    Mixtral's old names are block_sparse_moe, w1, w3 and w2. Unsloth's names of gpt-oss's experts
    have the expert's number last.
    """
    module = LISTED.sub(r"\1.\3.\2", module.replace(_OLD_BLOCK, _BLOCK))
    module = module.removesuffix(".layer") if module.endswith(_OLD_ROUTER) else module
    before, dot, last = module.rpartition(".")
    return f"{before}{dot}{_OLD_LINEARS.get(last, last)}" if is_of_experts(module) else module


def linear_of(module: str) -> str:
    """Return the linear that a module of experts adapts, in the naming of blobs (stored adapters).

    module: a module of one expert or of all experts, or a wrapped parameter; gate_up_proj and
        gate_up_projs count as gate_proj. Any other module is returned unchanged.
    """
    match = _EXPERTS.fullmatch(module)
    if match is None:
        return module
    return f"{match[1]}.{_LINEARS.get(match[2], match[2])}"


class ConfiguredNames:
    """All names by which a config can target a linear of a layer, given the modules with weights.

    A linear of experts has other names in a config if its weights are numbered (one module for each
    expert), stacked, or of wrapped parameters.
    """

    def __init__(
        self, given: Collection[str], *, old_linears: bool, parameters: bool = False
    ) -> None:
        """Find the form in which experts have weights, and how their linears are named.

        given: modules that have weights, in the trainer's naming.
        old_linears: whether trainers' configs for this base model call the linears w1, w3 and w2.
            Matters only if no expert has weights.
        parameters: whether a config can target experts as parameters alone. Matters only if no
            expert has weights.
        """
        of_experts = [module for module in given if is_of_experts(module)]
        numbered = [match for match in map(NUMBERED.fullmatch, of_experts) if match]
        listed = [match for match in map(LISTED.fullmatch, of_experts) if match]
        last_parts = {module.rpartition(".")[2] for module in of_experts}
        numbers = [int(match[2]) for match in numbered] or [int(match[3]) for match in listed]
        highest = max(numbers, default=0)
        blocks = [block for block in (_OLD_BLOCK, _BLOCK) if any(block in m for m in given)]
        self._blocks = blocks or ([_OLD_BLOCK, _BLOCK] if old_linears else [_BLOCK])
        self._has_old_linears = not last_parts.isdisjoint(_OLD_LINEARS)
        if not of_experts:
            self._has_old_linears = old_linears
        self._is_numbered = bool(numbered) or not (of_experts or parameters)
        self._is_listed = bool(listed)
        self._count = min(highest, len(numbers)) + 1
        ungated = any(".mixer.experts." in module for module in of_experts)
        self._is_of_parameters = last_parts <= {UP if ungated else GATE_UP, DOWN}

    def of(self, path: str) -> set[str]:
        """Return the names by which a config can target a linear.

        path: path of the linear in its layer, in the naming of blobs (stored adapters).
        """
        return {name for block in self._blocks for name in self._of(path.replace(_BLOCK, block))}

    def _of(self, path: str) -> set[str]:
        match = _EXPERTS.fullmatch(path)
        if match is None:
            return {path, f"{path}.weight"}
        experts, linear = match.groups()
        parameter = DOWN if linear == DOWN else first_parameter(experts)
        names = {f"{experts}.{parameter}"}
        if self._is_listed:
            return names | {f"{experts}.{parameter}s.{number}" for number in range(self._count)}
        if self._has_old_linears:
            linear = next(old for old, name in _OLD_LINEARS.items() if name == linear)
        if self._is_numbered:
            return names | {f"{experts}.{number}.{linear}" for number in range(self._count)}
        return names if self._is_of_parameters else names | {f"{experts}.{linear}"}
