"""Whether an adapter is served on other values of its base model than it was trained on."""

from lorikeet_engine.adapter_format import is_nf4, is_nf4_copy, last_part, original


def base_warning(trained_on: str | None, served: str, quantization: str | None) -> str | None:
    """Warn of an adapter of a quantised copy whose values are not those that are served.

    trained_on: what the adapter calls its base model; None if that is not known. served: the base
    model's name here; quantization: what its linears were rounded to, as EngineInfo says. Return a
    clause without a full stop; None where there is nothing to warn of.
    """
    if trained_on is None or last_part(trained_on) in (original(trained_on), last_part(served)):
        return None
    if is_nf4_copy(trained_on) and is_nf4(quantization):
        return None
    format_ = f" ({quantization})" if quantization else ""
    remedy = f", or serve those it was trained on: LORIKEET_WEIGHT_DTYPE={served}=nf4"
    return (
        f"it was trained on {trained_on}, a quantised copy, and is served on {served}{format_}, "
        f"whose values are others: compare some answers with those you had in training"
        f"{remedy if is_nf4_copy(trained_on) and not quantization else ''}"
    )
