"""Finds the linears that a PEFT config selects by targets and patterns, in the way PEFT does."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from lorikeet_engine.adapter_format.experts.names import (
    PARAMETER,
    ConfiguredNames,
    experts_of,
    is_listed,
)
from lorikeet_engine.adapter_format.expressions import MAX_EXPRESSIONS, Expressions, bad_config
from lorikeet_engine.adapter_format.families import (
    EMBEDDINGS,
    FAMILIES,
    HEAD,
    LAYER_INPUTS,
    OUTER,
    Family,
    LayerKind,
    Linear,
)
from lorikeet_engine.adapter_format.peft_release import (
    SEPARATE_PATTERNS,
    WHOLE_PATTERNS,
    Release,
    training_release,
)
from lorikeet_engine.adapter_format.tensor_names import (
    canonical_module,
    is_outer,
    layer_of,
    layers_prefix,
    linears_of,
    locate_module,
    parts_of,
    whole_of,
)

_ALL_LINEAR = "all-linear"
_MAX_LAYERS = 1_000
_MAX_NAMES = 50_000  # NeMo AutoModel names each expert's linears: 36,096 of Qwen3-235B-A22B's
_MAX_LINEARS = 200_000  # of all layers and their experts: 60 layers of 384 experts have 69,000
_MORE_LAYERS = 8  # of hybrids, checked after the last layer that has weights
# Families of whose experts Unsloth makes lists of linears.
_CLAMPED = tuple(n for n, family in FAMILIES.items() if family.experts and family.experts.clamped)
_ROUTER = ".mlp.router"  # of gpt-oss, no linear for PEFT
_EXPERTS = "experts"  # no part of the shared expert's name

Selects = Callable[[str], bool]


class TargetedBases(NamedTuple):
    """Base models in which each linear that a PEFT config targets has weights.

    families: names of families, sorted; None: all families that have the linears with weights.
    kinds: for hybrids alone, the kinds that each layer may have; empty for a layer that the base
        model must not have. Layers after the last one in the list may have any kind.
    """

    families: tuple[str, ...] | None = None
    kinds: tuple[tuple[LayerKind, ...], ...] = ()


def check_targets(
    raw: Mapping[str, Any], modules: Sequence[str], run: Expressions
) -> TargetedBases:
    """Check that the linears with weights are exactly the linears that a PEFT config targets.

    PEFT skips targets that the base model lacks. So this function returns the base models in which
    each target has weights: all if the config has neither target_modules nor target_parameters.

    raw: PEFT's config.
    modules: modules that have weights, in the trainer's naming, to which the config's expressions
        refer.
    run: matcher for the config's expressions.

    Raises AdapterRejected if the modules that have weights are not the modules that the config
    selects.
    """
    adapted = {module: whole_of(canonical_module(module)) for module in modules}
    linears = linears_of([*adapted.values()])
    outer = {m for m in modules if not _is_in_layer(m)}
    located = [locate_module(adapted[m], linears) for m in modules if m not in outer]
    listed = any(map(is_listed, adapted.values()))
    if raw.get("target_modules") is None and not raw.get("target_parameters"):
        return TargetedBases(_CLAMPED if listed else None)
    if raw.get("target_parameters") and not any(targets_parameter(raw, m) for m in modules):
        raise bad_config("no weight is for a parameter that it selects", "target_parameters")
    layers = {layer for layer, _ in located}
    last, with_weights = max(layers, default=0), {linears[index].module for _, index in located}
    names_experts = _EXPERTS in str(raw.get("target_modules"))
    given = set(modules)
    expected = _expected(modules, outer, last, with_weights, names_experts=names_experts)
    if listed:
        expected = {family: expected[family] for family in _CLAMPED if family in expected}
        if not expected:
            problem = "it has lists of experts, as gpt-oss alone, beside linears that gpt-oss lacks"
            raise bad_config(problem, "target_modules")
    every = given.union(*(names for each in expected.values() for names in each.all()))
    targeted = _targeted(raw, every, given, run)
    tied = raw.get("ensure_weight_tying") and any(is_outer(m, EMBEDDINGS) for m in outer)
    for module in modules:
        if not targeted(module) and not (tied and is_outer(module, HEAD)):
            problem = f"there are weights for {module}, which it leaves out"
            raise bad_config(problem, "target_modules")
    missing, kinds = dict[str, list[str]](), dict[str, tuple[tuple[LayerKind, ...], ...]]()
    for family, each in expected.items():
        missing[family], kinds[family] = each.missing(given, targeted)
    whole = sorted(family for family, modules in missing.items() if not modules)
    if not whole:
        module = min(missing.values(), key=len)[0]
        key = "target_parameters" if targets_parameter(raw, module) else "target_modules"
        raise bad_config(_missing(canonical_module(module), last, layers), key)
    hybrid = all(FAMILIES[family].is_hybrid for family in whole)
    families = None if len(whole) == len(expected) and not listed else tuple(whole)
    return TargetedBases(families, _union([kinds[family] for family in whole]) if hybrid else ())


def _union(
    kinds: Sequence[tuple[tuple[LayerKind, ...], ...]],
) -> tuple[tuple[LayerKind, ...], ...]:
    """Return, by layer, the kinds that the layer may have in some family.

    kinds: for each family, the kinds that each layer may have.
    """
    return tuple(
        tuple(dict.fromkeys(kind for of_family in layer for kind in of_family))
        for layer in zip(*kinds, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Expected:
    """Modules of a base model that a config could target, in the trainer's naming.

    names: modules that the base model has whatever the kinds of its layers, in the layers up to the
        last one that has weights, and outside them.
    layers: for hybrids, the modules that only layers of one kind have: by layer, then by the kind
        that the layer would have. The last len(beyond) entries are the layers in `beyond`.
    beyond: for hybrids, the modules of some layers after the last one that has weights, whatever
        the kinds of these layers.
    """

    names: set[str]
    layers: tuple[Mapping[LayerKind, set[str]], ...] = ()
    beyond: tuple[set[str], ...] = ()

    def all(self) -> list[set[str]]:
        """Return the modules of all three fields, as a list of sets."""
        return [
            self.names,
            *self.beyond,
            *(each for kinds in self.layers for each in kinds.values()),
        ]

    def missing(
        self, given: set[str], targeted: Selects
    ) -> tuple[list[str], tuple[tuple[LayerKind, ...], ...]]:
        """Return the targeted modules that have no weights, and the kinds that each layer may have.

        given: modules that have weights.
        targeted: whether the config targets a module.
        """
        missing = _lacking(self.names, given, targeted)
        wanted = list[tuple[LayerKind, ...]]()
        with_weights = len(self.layers) - len(self.beyond)
        for layer, kinds in enumerate(self.layers):
            adapted = set[str]().union(*kinds.values()) & given
            has = [kind for kind, names in kinds.items() if adapted <= names]
            if not has:
                parts = [
                    each.words for each, names in kinds.items() if not names.isdisjoint(adapted)
                ]
                problem = f"layer {layer} has weights of {' and of '.join(parts)}"
                raise bad_config(f"{problem}: no layer has both", "target_modules")
            lacks = {kind: _lacking(kinds[kind], given, targeted) for kind in has}
            possible = tuple(kind for kind, lacking in lacks.items() if not lacking)
            if layer >= with_weights and _lacking(
                self.beyond[layer - with_weights], given, targeted
            ):
                possible = ()
            elif layer < with_weights and not possible:
                fewest = min(lacks.values(), key=len)
                missing += fewest
            wanted.append(possible)
        if (
            self.layers
            and LayerKind.ATTENTION in self.layers[0]
            and not any(LayerKind.ATTENTION in kinds for kinds in wanted)
        ):
            # some layer of every base model has attention
            missing += _lacking(self.layers[0][LayerKind.ATTENTION], given, targeted)
        return missing, tuple(wanted)


def _lacking(names: set[str], given: set[str], targeted: Selects) -> list[str]:
    """Return, sorted, the modules that a config targets but that have no weights.

    names: modules to choose from.
    given: modules that have weights.
    targeted: whether the config targets a module.
    """
    return [module for module in sorted(names - given) if targeted(module)]


def _expected(
    modules: Sequence[str],
    outer: Collection[str],
    last: int,
    with_weights: Collection[str],
    *,
    names_experts: bool,
) -> dict[str, _Expected]:
    """Return all modules that a config could target, by family of base models (FAMILIES).

    Modules are named as the trainer names them. Families without one of the linears that have
    weights are left out. The family that the weights resemble most comes first.

    modules: modules that have weights, in the trainer's naming.
    outer: the modules with weights that are outside the decoder layers.
    last: number of the last layer that has weights.
    with_weights: paths, in a layer, of the linears that have weights in some layer.
    names_experts: whether target_modules names experts. If it names linears alone, such as
        down_proj, it selects no expert in a family whose experts are fused parameters, which PEFT
        does not find by the names of linears.
    """
    place, layers = layers_prefix(modules), range(min(last + 1, _MAX_LAYERS))
    given = {module.removesuffix(".weight").rpartition(".")[2] for module in modules}
    with_weights = {*with_weights, *map(canonical_module, outer)}
    beside = {each.module for each in OUTER} - {*map(canonical_module, outer)}
    found: dict[tuple[tuple[Linear, ...], bool, bool], _Expected] = {}
    expected = {}

    @cache
    def configured(old_linears: bool, parameters: bool) -> ConfiguredNames:
        return ConfiguredNames(modules, old_linears=old_linears, parameters=parameters)

    for name, family in FAMILIES.items():
        experts = family.experts
        old_linears = experts is not None and experts.old_linears
        parameters = experts is not None and experts.parameters and not names_experts
        kind = family.linears, old_linears, parameters
        has = {linear.module for linear in (*family.linears, *family.outer, HEAD, EMBEDDINGS)}
        if not has.issuperset(with_weights):
            continue
        if kind not in found:
            outside = _outside(beside & has, place, family)
            saved = _SavedNames(configured(old_linears, parameters), place, family, given)
            found[kind] = _Expected(outside | saved.of(layers))
            if family.is_hybrid:
                beyond = range(len(layers), len(layers) + _MORE_LAYERS)
                numbers = (*layers, *beyond)
                found[kind] = replace(
                    found[kind],
                    layers=tuple(
                        {each: saved.of([n], each) for each in family.kinds} for n in numbers
                    ),
                    beyond=tuple(saved.of([n]) for n in beyond),
                )
        expected[name] = found[kind]
    return expected


def _outside(modules: Collection[str], place: str, family: Family) -> set[str]:
    """Return the names of modules outside the decoder layers, in a trainer's naming.

    Gemma's per_layer_model_projection is returned by two names, since trainers target it as a
    module or as a parameter, whose name ends with ".weight".

    modules: names of these modules in blobs (stored adapters).
    place: path before "layers." in the trainer's names.
    """
    ends = {module: module.removeprefix("model.") for module in modules}
    ends |= {EMBEDDINGS.module: family.embeddings}
    found = {module if module == HEAD.module else place + ends[module] for module in modules}
    if LAYER_INPUTS.module in modules:
        found.add(f"{place}{LAYER_INPUTS.name}.weight")
    return found


@dataclass(frozen=True, slots=True)
class _SavedNames:
    """Names of a family's linears in a trainer's naming.

    configured: names by which a config can target a linear.
    place: path before "layers." in the trainer's names.
    given: last parts of the names of modules that have weights.
    """

    configured: ConfiguredNames
    place: str
    family: Family
    given: Set[str]

    def of(self, layers: Collection[int], kind: LayerKind | None = None) -> set[str]:
        """Return all names that the linears of some layers can have in a config.

        layers: numbers of the layers.
        kind: only linears that layers of this kind alone have; None: only linears that layers of
            every kind have.
        """
        linears = [
            each for each in self.family.linears if (kind in each.kinds if kind else not each.kinds)
        ]
        forms = {each: self._forms(each) for each in linears}
        found = set[str]()
        for layer, linear in ((layer, each) for layer in layers for each in linears):
            for form in forms[linear]:
                found |= self.configured.of(form.path(layer))
            if len(found) > _MAX_LINEARS:
                problem = f"{len(layers)} layers of such experts: over {_MAX_LINEARS} linears"
                raise bad_config(problem, "target_modules")
        return {self.place + module.removeprefix("model.") for module in found}

    def _forms(self, linear: Linear) -> list[Linear]:
        """Return the linears by which a config can target a linear: itself, its parts, or both.

        Both if neither has weights.
        """
        parts = [replace(linear, module=name) for name in parts_of(linear.module)]
        if not parts:
            return [linear]
        forms = [linear], parts
        given = [form for form in forms if not self.given.isdisjoint(each.name for each in form)]
        return [each for form in given or forms for each in form]


def targets_parameter(raw: Mapping[str, Any], name: str) -> bool:
    """Whether a config's target_parameters selects a parameter, by its full name or an ending.

    raw: PEFT's config.
    """
    targets = _strings(raw.get("target_parameters") or [], "target_parameters")
    return not _ends(name).isdisjoint(targets)


def _missing(module: str, last: int, layers: Collection[int]) -> str:
    """Describe, for an error message, a targeted module that has no weights.

    last: number of the last layer that has weights.
    layers: numbers of all layers that have weights.
    """
    known = (*(outer.module for outer in OUTER), *(f"model.layers.{layer}." for layer in layers))
    doubt = "" if module.startswith(known) else f"layer {last}, the last, is misnumbered, "
    return (
        f"it selects {module}, but no weight is for it: {doubt}the file is incomplete, or "
        "exclude_modules or layers_to_transform must leave it out"
    )


Patterns = tuple[dict[str, Any], dict[str, Any]]
"""Two mappings by module: the ranks that a rank_pattern gives, and the alphas that an alpha_pattern
gives.
"""


def resolve_patterns(
    raw: Mapping[str, Any],
    modules: Sequence[str],
    run: Expressions,
    warn: Callable[[str], object],
) -> Patterns:
    """Return, by module, the ranks of rank_pattern and the alphas of alpha_pattern, as the release
    of PEFT that trained the adapter reads them.

    If several of a pattern's keys match a module, the first one determines the value.

    raw: PEFT's config.
    modules: modules that have weights, in the trainer's naming.
    run: matcher for the patterns' expressions.
    warn: called with a sentence if the config does not show the release, and releases differ.
    """
    patterns = []
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = raw.get(key) or {}
        if not isinstance(pattern, Mapping):
            raise bad_config("want an object", key)
        if len(pattern) > MAX_EXPRESSIONS:
            raise bad_config(f"{len(pattern)} entries: the limit is {MAX_EXPRESSIONS}", key)
        patterns.append(pattern)
    release = training_release(raw)
    found = _matched(patterns, modules, run, release or WHOLE_PATTERNS)
    if release is None and any(patterns):
        older = ((0, 0, 0), SEPARATE_PATTERNS)
        if any(_matched(patterns, modules, run, each) != found for each in older):
            warn(
                "PEFT before 0.15 reads the names in rank_pattern or alpha_pattern otherwise, and "
                "adapter_config.json does not show which release trained: served as the newest "
                "reads them; name modules in full, or set peft_version"
            )
    return found


def _matched(
    patterns: Sequence[Mapping[str, Any]],
    modules: Sequence[str],
    run: Expressions,
    release: Release,
) -> Patterns:
    """Return the values of patterns by module, as a release of PEFT reads them.

    patterns: rank_pattern and alpha_pattern.
    modules: modules that have weights, in the trainer's naming.
    run: matcher for the patterns' expressions.
    """
    ranks, alphas = patterns
    if release < SEPARATE_PATTERNS:  # the first key of both patterns is looked up in each
        keys = [*ranks, *alphas]
        matches = run.first_matches([_behind_a_dot(key) for key in keys], modules, "rank_pattern")
        names = {m: keys[matches[m]] if m in matches else m for m in modules}
        return _values(ranks, names), _values(alphas, names)
    behind = _behind_a_dot if release < WHOLE_PATTERNS else _behind_any
    found = []
    for field, pattern in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        keys = list(pattern)
        matches = run.first_matches([behind(key) for key in keys], modules, field)
        names = {m: keys[matches[m]] if m in matches else m for m in modules}
        found.append(_values(pattern, names))
    return found[0], found[1]


def _values(pattern: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return, by module, the value of the pattern's key for the module; modules without a key in
    the pattern are left out.

    names: for each module, the key to look up.
    """
    return {module: pattern[key] for module, key in names.items() if key in pattern}


def _behind_any(name: str) -> str:
    """Return the regular expression that PEFT builds from a name in a config.

    It matches the name alone, and the name after any prefix that ends in a dot.
    """
    return rf"(.*\.)?({name})"


def _behind_a_dot(name: str) -> str:
    """Return an expression that matches where PEFT before 0.15 finds a name in a config.

    PEFT's expression is not grouped, so each alternative in a name stands alone, and only the last
    alternative must match up to the end of the module's name.
    """
    return rf"(?:.*\.{name}$).*"


def _targeted(
    raw: Mapping[str, Any], every: Iterable[str], given: Collection[str], run: Expressions
) -> Selects:
    """Return a function that tells whether a config targets a module or parameter.

    raw: PEFT's config.
    every: all names that the function will be called with.
    given: names of the modules that have weights.
    run: matcher for the config's regular expressions.
    """
    named = _targeted_modules(raw, every, run)
    no_linears = (".weight", _ROUTER) if _targets_every_linear(raw) else (".weight",)

    @cache  # families share most of their names
    def selects(name: str) -> bool:
        is_parameter = name.endswith(no_linears) or PARAMETER.fullmatch(name) is not None
        if name not in given:
            return targets_parameter(raw, name) if is_parameter else named(name)
        return targets_parameter(raw, name) or named(name)

    return selects


def _targets_every_linear(raw: Mapping[str, Any]) -> bool:
    targets = raw.get("target_modules")
    return isinstance(targets, str) and targets.lower() == _ALL_LINEAR


def _targeted_modules(raw: Mapping[str, Any], modules: Iterable[str], run: Expressions) -> Selects:
    targets = raw.get("target_modules") or []
    excluded = _names(raw, "exclude_modules", modules, run)
    if isinstance(targets, str):  # PEFT ignores layers_to_transform beside an expression
        every = _targets_every_linear(raw)
        selected = _is_linear if every else _names(raw, "target_modules", modules, run)
        return lambda module: selected(module) and not excluded(module)
    named, in_layer = _names(raw, "target_modules", modules, run), _layers(raw, modules, run)
    whole = set(targets)  # a full name is targeted in any layer

    def selects(module: str) -> bool:
        is_named = named(module) or named(experts_of(module))
        return (module in whole or (is_named and in_layer(module))) and not excluded(module)

    return selects


def _names(raw: Mapping[str, Any], key: str, modules: Iterable[str], run: Expressions) -> Selects:
    """Return a function that tells whether a key of the config selects a module.

    The key's value is one regular expression, or a list of endings of module names.

    modules: all modules that the function will be called with.
    run: matcher for the expression.
    """
    value = raw.get(key)
    if isinstance(value, str) and value:
        matches = run.first_matches([value], modules, key)
        return lambda module: module in matches
    ends = set(_strings(value or [], key, _MAX_NAMES))
    return lambda module: not _ends(module).isdisjoint(ends)


def _is_in_layer(module: str) -> bool:
    return not any(is_outer(module, outer) for outer in OUTER)


def _is_linear(module: str) -> bool:
    """Whether PEFT's all-linear selects a module: all but the head and the embeddings."""
    return not any(is_outer(module, outer) for outer in (HEAD, EMBEDDINGS))


def _ends(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[at:]) for at in range(len(parts))}


def _layers(raw: Mapping[str, Any], modules: Iterable[str], run: Expressions) -> Selects:
    """Return a function that tells whether a module is in one of the config's layers_to_transform.

    Layers are counted in the module lists that layers_pattern names.

    modules: all modules that the function will be called with.
    run: matcher for the names in layers_pattern.
    """
    wanted = raw.get("layers_to_transform")
    wanted = [wanted] if type(wanted) is int else wanted
    if not wanted:
        return lambda _: True
    if not isinstance(wanted, list) or not all(type(layer) is int for layer in wanted):
        raise bad_config("want an integer or a list of integers", "layers_to_transform")
    wanted = set(wanted)  # the list may be long
    given = raw.get("layers_pattern") or []
    names = _strings([given] if isinstance(given, str) else given, "layers_pattern")
    layers = {module: layer_of(module) for module in modules if _is_in_layer(module)}
    before = {module: module.partition(f".{layer}.")[0] for module, layer in layers.items()}
    expressions = [_behind_any(name) for name in names]
    known = run.first_matches(expressions, set(before.values()), "layers_pattern")

    def selects(module: str) -> bool:
        inside = module in layers and (not names or before[module] in known)
        return inside and int(layers[module]) in wanted

    return selects


def _strings(value: Any, key: str, most: int = MAX_EXPRESSIONS) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad_config("want a text or a list of texts", key)
    if len(value) > most:
        raise bad_config(f"{len(value)} entries: the limit is {most}", key)
    return value
