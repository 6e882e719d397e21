"""The cost model: what steps and loads take, and how routing weighs them."""

from dataclasses import dataclass, field

from lorikeet_engine.costs import LoadCosts, StepCosts


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """All coefficients of a replica's expected cost.

    others_weight: what a second costs by which a request delays another's answer, in seconds of its
    own first token. copy_s: what it is worth not to load an adapter. evicted_use_s: for each recent
    use of what is evicted for it, about a load from the disk. answer_tokens: an answer's length,
    not known ahead. docs/routing.md has what other values of the three did.
    """

    steps: StepCosts = field(default_factory=StepCosts)
    loads: LoadCosts = field(default_factory=LoadCosts)
    answer_tokens: float = 220.0  # mean of Azure's conversations
    others_weight: float = 0.1
    copy_s: float = 0.2
    evicted_use_s: float = 0.03


H200_LLAMA_8B = CostCoefficients()


def capacity_per_s(
    costs: CostCoefficients, prompt_tokens: float, answer_tokens: float, ranks: int
) -> float:
    """Requests that one replica could answer each second with its batch always full.

    prompt_tokens, answer_tokens: means. ranks: Σ rank of a step.
    """
    steps = costs.steps
    prompt_s = prompt_tokens * (steps.prompt_token_s + (steps.lora_token_s if ranks else 0.0))
    token_s = steps.decode_s(steps.max_running, ranks) / steps.max_running
    return 1.0 / (prompt_s + answer_tokens * token_s)
