"""Tests which quantization_configs are read, and that others are refused by name."""

import pytest

from jsparse.models.quantization_config import Scheme, scheme_of
from tests.support.quantized_writers import (
    AWQ,
    BLOCK_FP8,
    GPTQ,
    PER_TENSOR,
    W4A16,
    compressed,
)

pytestmark = pytest.mark.pure


def of(fields):
    return scheme_of({"quantization_config": fields})


def test_schemes():
    assert scheme_of({}) is None and scheme_of({"quantization_config": None}) is None
    assert of(BLOCK_FP8) == Scheme("values", 8, ((128, 128),), floats=True)
    assert of(PER_TENSOR) == Scheme("values", 8, ((0, 0), (1, 0)), floats=True)
    w8 = compressed("int-quantized", symmetric=False)
    assert of(w8) == Scheme("values", 8, ((1, 0),), zeros=True)
    assert of(W4A16) == Scheme("packed", 4, ((1, 128),))
    assert of(AWQ) == Scheme("awq", 4, ((1, 128),), zeros=True)
    assert of(GPTQ) == Scheme("gptq", 4, ((1, 64),), zeros=True, less_one=True)
    second = of(GPTQ | {"checkpoint_format": "gptq_v2", "sym": True, "group_size": -1})
    assert second == Scheme("gptq", 4, ((1, 0),))


def test_older_names():
    assert scheme_of({"compression_config": {**W4A16, "quant_method": None}}) == of(W4A16)
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    assert of(older) == Scheme("awq", 4, ((1, 64),), zeros=True)


def test_groups_of_modules_in_one_format_are_read():
    groups = W4A16["config_groups"]["group_0"]
    own = W4A16 | {"format": "mixed-precision"}
    own["config_groups"] = {
        "attention": groups | {"format": "pack-quantized"},
        "mlp": groups | {"format": "pack-quantized", "targets": ["re:.*mlp.*"]},
    }
    assert of(own) == of(W4A16)


def changed(format_, **weights):
    """Returns W4A16 or W8A16 in another format with other arguments of weights."""
    given = {"num_bits": 4, "strategy": "group", "group_size": 128} if "pack" in format_ else {}
    return compressed(format_, **given | weights)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"quant_method": "modelopt"}, "quant_method='modelopt'"),
        ({"bits": 4}, "quant_method=None"),
        (["awq"], r"quantization_config=\['awq'\]: must be an object"),
        (BLOCK_FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (BLOCK_FP8 | {"activation_scheme": "none"}, "activation_scheme='none'"),
        (BLOCK_FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        (BLOCK_FP8 | {"weight_block_size": [128, 16]}, r"weight_block_size=\[128, 16\]"),
        (BLOCK_FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]"),
        (AWQ | {"bits": 3}, "bits=3"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"zero_point": False}, "zero_point=False"),
        (AWQ | {"backend": "llm-awq"}, "backend='llm-awq'"),
        (AWQ | {"group_size": 48}, "group_size=48: must be -1 or a multiple of 32"),
        (AWQ | {"group_size": "128"}, "group_size='128'"),
        ({"quant_method": "awq", "bits": 4}, "group_size' is missing"),
        (GPTQ | {"bits": 3}, "bits=3"),
        (GPTQ | {"bits": None}, "bits' is missing"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype='int64'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic has '\+:"),
        (GPTQ | {"dynamic": 4}, "dynamic=4: must be an object"),
        (changed("nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (changed("marlin-24"), "format='marlin-24'"),
        (changed("pack-quantized", num_bits=3), "weights.num_bits=3"),
        (changed("int-quantized", num_bits=4), "weights.num_bits=4"),
        (changed("pack-quantized", actorder="group"), "weights.actorder='group'"),
        (changed("pack-quantized", dynamic=True), "weights.dynamic=True"),
        (changed("pack-quantized", symmetric="no"), "weights.symmetric='no'"),
        (changed("pack-quantized", strategy="token"), "weights.strategy='token'"),
        (changed("pack-quantized", group_size=None), "weights.group_size' is missing"),
        (changed("float-quantized"), "weights.type='int' with symmetric=True"),
        (changed("float-quantized", type="float", symmetric=False), "with symmetric=False"),
        (changed("float-quantized", type="float", strategy="block"), "block_structure' is missing"),
        (
            W4A16 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format='sparse-24-bitmask'",
        ),
        (W4A16 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
        (W4A16 | {"config_groups": {}}, "has 0 formats of weights"),
        (W4A16 | {"config_groups": 4}, "config_groups=4: must be an object"),
        (
            W4A16
            | {
                "config_groups": {
                    **W4A16["config_groups"],
                    "group_1": changed("pack-quantized", num_bits=8)["config_groups"]["group_0"],
                }
            },
            "has 2 formats of weights",
        ),
    ],
)
def test_others_are_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=f"^config field [^\n]*{named}[^\n]*$"):
        of(fields)
