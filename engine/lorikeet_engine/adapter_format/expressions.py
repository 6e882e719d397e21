"""Runs the regular expressions of PEFT's configs, which strangers wrote.

They are run where an adapter is packed, never by the server, and all of one config within a
budget of CPU time: one of thirty characters can run for years.
"""

import time

import regex

from lorikeet_engine.errors import AdapterRejected

CONFIG_FILE = "adapter_config.json"
MAX_EXPRESSIONS = 2_000
MAX_EXPRESSION_CHARACTERS = 4_096
BUDGET_S = 0.75


class Expressions:
    """The expressions of one config. `field` names the key at fault in what is raised."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + BUDGET_S

    def compile(self, expression: str, field: str) -> "regex.Pattern[str]":
        """Compile an expression. Raises AdapterRejected."""
        if len(expression) > MAX_EXPRESSION_CHARACTERS:
            raise bad_config(
                f"an expression of {len(expression)} characters: the limit is "
                f"{MAX_EXPRESSION_CHARACTERS}",
                field,
            )
        self._left_s(field)
        try:
            return regex.compile(expression)
        except (regex.error, RecursionError, OverflowError) as error:
            raise bad_config(f"an entry that is no regular expression: {error}", field) from error

    def fullmatch(self, pattern: "regex.Pattern[str]", text: str, field: str) -> bool:
        """Whether the whole text matches. Raises AdapterRejected."""
        try:
            return pattern.fullmatch(text, timeout=self._left_s(field)) is not None
        except TimeoutError:
            raise _too_slow(field) from None

    def _left_s(self, field: str) -> float:
        left_s = self._end_s - time.thread_time()
        if left_s <= 0:
            raise _too_slow(field)
        return left_s


def _too_slow(field: str) -> AdapterRejected:
    return bad_config(
        f"its expressions run for over {BUDGET_S} s: name the modules, or nest no repetitions",
        field,
    )


def bad_config(message: str, field: str) -> AdapterRejected:
    """What to raise about one key of the config."""
    return AdapterRejected(f"{CONFIG_FILE}: {field}: {message}", field=field)
