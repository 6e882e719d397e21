"""Manifests that contain expressions of Helm's template language."""

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conditional:
    """Value that is rendered only if a condition holds."""

    condition: str
    value: Any


class Template:
    """Expressions and conditions in manifests, and the text of a Helm template from them."""

    def __init__(self) -> None:
        self._expressions: list[str] = []
        self._conditionals: list[Conditional] = []

    def expression(self, text: str) -> str:
        """Return a placeholder to put into a manifest; the text of the template has the expression
        `text` instead.
        """
        self._expressions.append(text)
        return f"EXPRESSION-{len(self._expressions) - 1}-"

    def put(self, manifest: Manifest, values: dict[str, str]) -> None:
        """Put values at paths of a manifest, as JSON, which is also YAML.

        values: path, separated by slashes → expression.
        """
        for place, value in values.items():
            *path, last = (int(step) if step.isdigit() else step for step in place.split("/"))
            node: Any = manifest
            for step in path:
                node = node[step]
            node[last] = self.expression(f"{value} | toJson")

    def extend(self, node: Manifest, plain: Manifest, changed: Manifest, condition: str) -> None:
        """Add to `node` the differences of `changed` from `plain`, under a condition.

        node: manifest to change in place, a copy of `plain` with expressions.
        condition: expression of Helm's template language.
        """
        for key, value in changed.items():
            if key not in plain:
                node[key] = self._conditional(condition, value)
            elif isinstance(value, dict):
                self.extend(node[key], plain[key], value, condition)
            elif isinstance(value, list):
                for index, item in enumerate(plain[key]):
                    if isinstance(item, dict):
                        self.extend(node[key][index], item, value[index], condition)
                added = value[len(plain[key]) :]
                node[key] += [self._conditional(condition, item) for item in added]
            elif plain[key] != value:
                choice = f"ternary {json.dumps(value)} {json.dumps(plain[key])} {condition}"
                node[key] = self.expression(f"{choice} | toJson")

    def text(self, manifests: list[Manifest]) -> str:
        """Return the text of the template file."""
        text = yaml.safe_dump_all(manifests, width=1000)
        text = re.sub(r"^(.*)CONDITIONAL-(\d+)-$", self._line, text, flags=re.MULTILINE)
        return re.sub(
            r'"?EXPRESSION-(\d+)-"?', lambda m: "{{ " + self._expressions[int(m[1])] + " }}", text
        )

    def _conditional(self, condition: str, value: Any) -> str:
        self._conditionals.append(Conditional(condition, value))
        return f"CONDITIONAL-{len(self._conditionals) - 1}-"

    def _line(self, found: re.Match[str]) -> str:
        conditional = self._conditionals[int(found[2])]
        line = found[1] + json.dumps(conditional.value)
        return "\n".join(("{{- if " + conditional.condition + " }}", line, "{{- end }}"))
