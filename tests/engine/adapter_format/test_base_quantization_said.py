"""Descriptions of the rounding of served weights, by checkpoint and weight_dtype."""

import pytest

from lorikeet_engine.adapter_format import (
    Quantization,
    QuantizedLinears,
    is_nf4,
    served_quantization,
)


@pytest.mark.parametrize("stored", Quantization)
def test_a_quantised_checkpoint_is_called_by_its_format(stored: Quantization) -> None:
    said = served_quantization(QuantizedLinears(stored), "auto")
    assert said == stored.value
    assert is_nf4(said) is (stored is Quantization.NF4)


def test_every_format_but_fp8_has_4_bits_that_can_stay_packed() -> None:
    assert [stored for stored in Quantization if not stored.has_4_bits] == [Quantization.FP8]
    mxfp4 = QuantizedLinears(Quantization.MXFP4)
    assert served_quantization(mxfp4, "packed") == "mxfp4, packed"


def test_rounding_while_loading_is_described() -> None:
    assert served_quantization(None, "nf4") == "rounded to nf4"
    assert is_nf4("rounded to nf4")
    assert served_quantization(QuantizedLinears(Quantization.NF4), "fp8") == "nf4, rounded to fp8"
    assert is_nf4("nf4, rounded to fp8"), "what an adapter was trained on, but for FP8's rounding"
    assert served_quantization(QuantizedLinears(Quantization.FP8), "fp8") == "fp8"
    assert served_quantization(QuantizedLinears(Quantization.NF4), "packed") == "nf4, packed"
    assert served_quantization(None, "auto") is None
    assert not is_nf4(None)
