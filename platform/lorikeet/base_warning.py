"""Warning of an adapter that is served on other base weights than it was trained on."""

from lorikeet_engine.adapter_format import (
    Quantization,
    is_fp8_copy,
    is_nf4,
    is_nf4_copy,
    last_part,
    unquantised_name,
)


def base_warning(trained_on: str | None, served: str, quantization: str | None) -> str | None:
    """Return a warning if an adapter was trained on other weights than the served base model's.

    The result is a clause without a full stop, or None.

    trained_on: name that the adapter's files give its base model; None or empty if unknown.
    served: name of the served base model.
    quantization: quantization of the served linears, such as "rounded to fp8"; None if they are not
        quantised.
    """
    if not trained_on:
        return None
    format_ = f" ({quantization})" if quantization else ""
    if last_part(trained_on) in (unquantised_name(trained_on), last_part(served)):
        if Quantization.AWQ not in (quantization or "") or "awq" in trained_on.lower():
            return None
        return (
            f"it was trained on {trained_on}, and is served on {served}{format_}: AWQ scales what "
            "linears read, so an adapter means something else there, unless it was trained on "
            "those weights"
        )
    if _has_values_of(trained_on, quantization):
        return None
    return (
        f"it was trained on {trained_on}, a quantised copy, and is served on {served}{format_}, "
        f"whose values are others: compare some answers with those you had in training"
        f"{_remedy(trained_on, served) if not quantization else ''}"
    )


def _has_values_of(copy: str, quantization: str | None) -> bool:
    """Whether the served linears equal the linears of a quantised copy of the base model.

    copy: name of the copy, which tells its quantization.
    quantization: quantization of the served linears, such as "rounded to fp8"; None if they are not
        quantised.
    """
    if is_fp8_copy(copy):
        return quantization in ("fp8", "rounded to fp8")
    if not is_nf4_copy(copy) or quantization is None:
        return False
    return is_nf4(quantization) and not (_is_partly(copy) and quantization.startswith("rounded"))


def _is_partly(copy: str) -> bool:
    """Whether a copy's name shows that Unsloth made it and left some linears unquantised."""
    return copy.lower().endswith("-unsloth-bnb-4bit")


def _remedy(copy: str, served: str) -> str:
    if not is_nf4_copy(copy):
        return ""
    if _is_partly(copy):
        return ", or serve that copy, in which some linears were left as they were"
    return f", or serve those it was trained on: LORIKEET_WEIGHT_DTYPE={served}=nf4"
