"""Probes: token ids with a trainer's log-probabilities, by which a replica proves its parity."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lorikeet.errors import InvalidInput

MAX_PROBES = 256
MAX_TOKENS = 2**16
"""Maximum number of tokens of all probes together; 64 probes of 512 tokens are half of it."""
MAX_VALUES = 4 * MAX_TOKENS
"""Approximate maximum number of JSON values of a request with probes."""
_MAX_MESSAGES = 64

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Logprob = Annotated[float, Field(le=1e-3)]  # float32 rounds log(1) to more than 0
Dtype = Literal["float32", "bfloat16", "float16"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Probe(_Part):
    """One sequence of tokens with the trainer's log-probabilities of its last tokens.

    token_ids: prompt and completion.
    logprobs: log-probability of each of the last tokens, at temperature 1; fewer than token_ids.
    base_logprobs: those of the base model without the adapter, computed by the trainer; empty if
        unknown.
    messages: chat messages of which the trainer's chat template made the tokens before the first
        scored one; empty for other prompts.
    """

    token_ids: Annotated[list[TokenId], Field(min_length=2, max_length=MAX_TOKENS)]
    logprobs: Annotated[list[Logprob], Field(min_length=1)]
    base_logprobs: list[Logprob] = []
    messages: Annotated[list[dict[str, Any]], Field(max_length=_MAX_MESSAGES)] = []

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids before the first scored token."""
        return self.token_ids[: len(self.token_ids) - len(self.logprobs)]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.logprobs) >= len(self.token_ids):
            raise ValueError(
                f"{len(self.logprobs)} logprobs for {len(self.token_ids)} token_ids: want fewer, "
                "since nothing predicts the first token"
            )
        if self.base_logprobs and len(self.base_logprobs) != len(self.logprobs):
            raise ValueError(
                f"{len(self.base_logprobs)} base_logprobs and {len(self.logprobs)} logprobs: want "
                "as many, or none"
            )
        if any(not isinstance(each.get("content"), str) for each in self.messages):
            raise ValueError("messages: want texts as contents")
        return self


class Probes(_Part):
    """Probes of one adapter, and facts about the trainer that made them; unknown facts are None.

    probes: sequences of tokens with the trainer's log-probabilities.
    dtype: data type of the trainer's base model.
    digest: SHA-256 of the blob of the adapter that the trainer scored with.
    linears: names of the adapted linears within their layer.
    scaling: factor of B @ A that all modules have.
    base_model: name of the trainer's base model.
    peft_version: release of PEFT.
    """

    probes: Annotated[list[Probe], Field(min_length=1, max_length=MAX_PROBES)]
    dtype: Dtype | None = None
    digest: Digest | None = None
    linears: list[str] | None = None
    scaling: float | None = None
    base_model: str | None = None
    peft_version: str | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        tokens = sum(len(probe.token_ids) for probe in self.probes)
        if tokens > MAX_TOKENS:
            raise ValueError(f"{tokens} tokens in all probes: the limit is {MAX_TOKENS}")
        return self


def parse_probes(text: str | bytes) -> Probes:
    """Parse the JSON of probes, sequences of tokens with the trainer's log-probabilities.

    Raises InvalidInput, which names the field at fault.
    """
    try:
        return Probes.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(
            f"the probes{f', {path}' if path else ''}: {problem}; `lorikeet parity` makes probes",
            param="probes",
        ) from None
