"""Writes a model's plain weights as quantized checkpoints, each number rounded to the nearest code.

Scales follow from the largest numbers of a group alone, so that a file needs neither calibration
nor a search; a format's own tools make better ones. Sources: compressed-tensors'
`calculate_qparams`, AutoAWQ's and GPTQModel's layers.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file

from bench.lib.environment import available_cores

Tensors = Mapping[str, np.ndarray]
Area = tuple[int, int]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of the codes of an integer in AWQ, from the lowest bits."""
_FLOAT8, _BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
_LARGEST_FLOAT8 = 448
_GROUP = (1, 128)
# metadata of a GGUF file that its writer states itself, or that differs in the new file
_OWN_METADATA = ("general.architecture", "general.alignment", "general.file_type")


class Quantizer(NamedTuple):
    """A format of safetensors.

    Attributes:
        config: the quantization_config.
        parts: returns the tensors of a module by suffix from its numbers, float32 [out, in].
    """

    config: dict[str, Any]
    parts: Callable[[np.ndarray], dict[str, np.ndarray]]


def write_safetensors(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, quantizer: Quantizer | None = None
) -> Path:
    """Writes a model's folder, without a tokenizer; the linear maps of its layers are quantized.

    Args:
        folder: the folder to create.
        config: the fields of config.json.
        tensors: tensors under Hugging Face's names.
        quantizer: the format; None: all tensors stay as they are.

    Raises:
        ValueError: the format's groups do not divide a matrix.
    """

    def stored(name: str) -> dict[str, np.ndarray]:
        tensor = np.ascontiguousarray(tensors[name])
        if quantizer is None or not name.endswith("_proj.weight"):
            return {name: tensor}
        module = name.removesuffix("weight")
        try:
            parts = quantizer.parts(tensor.astype(np.float32))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return {module + suffix: np.ascontiguousarray(part) for suffix, part in parts.items()}

    folder.mkdir(parents=True)
    with ThreadPoolExecutor(available_cores()) as pool:
        made = {name: part for parts in pool.map(stored, tensors) for name, part in parts.items()}
    save_file(made, folder / "model.safetensors")
    fields = dict(config)
    if quantizer is not None:
        fields["quantization_config"] = quantizer.config
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def write_gguf(
    file: Path, metadata: Mapping[str, Any], tensors: Tensors, kind: GGMLQuantizationType
) -> Path:
    """Writes a GGUF file with the format's own package.

    Args:
        file: the file to create.
        metadata: values by key, with the architecture.
        tensors: tensors under GGUF's names.
        kind: the type of matrices. The matrix of the logits has Q8_0 at least, whose type
            llama.cpp raises in the same way; other tensors have float32.
    """
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"

    def stored(name: str) -> tuple[np.ndarray, GGMLQuantizationType | None]:
        numbers = tensors[name].astype(np.float32)
        if numbers.ndim != 2:
            return numbers, None
        own = GGMLQuantizationType.Q8_0 if name == head else kind
        return gguf.quants.quantize(numbers, own), own

    writer = gguf.GGUFWriter(file, metadata["general.architecture"])
    for key, value in metadata.items():
        if key not in _OWN_METADATA:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    with ThreadPoolExecutor(available_cores()) as pool:
        for name, (array, own) in zip(tensors, pool.map(stored, tensors), strict=True):
            writer.add_tensor(name, array, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def integers_of(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Packs codes of successive columns in 32-bit integers, the first in the lowest bits."""
    rows, columns = codes.shape
    count = 32 // bits
    padded = np.zeros((rows, -(-columns // count) * count), np.uint32)
    padded[:, :columns] = codes
    made = np.zeros((rows, padded.shape[1] // count), np.uint32)
    for place, column in enumerate(order or range(count)):
        made |= padded[:, column::count] << np.uint32(bits * place)
    return made.view(np.int32)


def compressed(format_: str, **weights: Any) -> dict[str, Any]:
    """Returns the quantization_config of compressed-tensors for matrices of one kind."""
    given = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "int",
    }
    group = {"input_activations": None, "targets": ["Linear"], "weights": given | weights}
    return {
        "config_groups": {"group_0": group},
        "format": format_,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
    }


def _float8(numbers: np.ndarray, area: Area, suffix: str) -> dict[str, np.ndarray]:
    scales = _scales(_largest(np.abs(numbers), area), _LARGEST_FLOAT8, _BF16)
    # the scale's own rounding leaves at most 450, which becomes 448; above 464 is NaN
    codes = (numbers / _expanded(scales, area, numbers)).astype(_FLOAT8)
    return {"weight": codes, suffix: scales}


def _symmetric(
    numbers: np.ndarray, bits: int, area: Area, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes from 0, whose zero point is the middle, and scales."""
    half = 1 << bits - 1
    scales = _scales(_largest(np.abs(numbers), area), half - 0.5, dtype)
    steps = np.rint(numbers / _expanded(scales, area, numbers)) + half
    return np.clip(steps, 0, 2 * half - 1).astype(np.uint8), scales


def _packed(numbers: np.ndarray, bits: int, area: Area) -> dict[str, np.ndarray]:
    codes, scales = _symmetric(numbers, bits, area, _BF16)
    return {
        "weight_packed": integers_of(codes, bits),
        "weight_scale": scales,
        "weight_shape": np.array(numbers.shape, np.int64),
    }


def _awq(numbers: np.ndarray) -> dict[str, np.ndarray]:
    low = np.minimum(-_largest(-numbers, _GROUP), 0)
    scales = _scales(np.maximum(_largest(numbers, _GROUP), 0) - low, 15, np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(np.uint8)
    steps = np.rint(numbers / _expanded(scales, _GROUP, numbers))
    codes = np.clip(steps + _expanded(zeros, _GROUP, numbers), 0, 15).astype(np.uint8)
    return {
        "qweight": integers_of(codes.T, 4, AWQ_ORDER),
        "qzeros": integers_of(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T,
    }


def _gptq(numbers: np.ndarray) -> dict[str, np.ndarray]:
    codes, scales = _symmetric(numbers, 4, _GROUP, np.float16)
    # the file has zero points less one
    zeros = np.full(scales.T.shape, 8 - 1, np.uint8)
    return {
        "qweight": integers_of(codes, 4).T,
        "qzeros": integers_of(zeros, 4),
        "scales": scales.T,
        "g_idx": np.arange(numbers.shape[1], dtype=np.int32) // np.int32(_GROUP[1]),
    }


def _largest(numbers: np.ndarray, area: Area) -> np.ndarray:
    """Returns the largest number of each area; areas at the ends of columns may be cut off.

    Raises:
        ValueError: areas of several columns do not divide the rows.
    """
    rows, columns = area[0], area[1] or numbers.shape[1]
    if numbers.shape[1] % columns:
        raise ValueError(
            f"sums over {numbers.shape[1]} numbers: must be a multiple of {columns} in this format"
        )
    groups = numbers.reshape(len(numbers), -1, columns).max(-1)
    return groups if rows == 1 else np.maximum.reduceat(groups, range(0, len(groups), rows))


def _scales(largest: np.ndarray, top: float, dtype: Any) -> np.ndarray:
    """Returns the scales by which `largest` becomes `top`; 1 for areas of zeros."""
    scales = (largest / np.float32(top)).astype(dtype)
    return np.where(scales == 0, np.ones((), dtype), scales)


def _expanded(areas: np.ndarray, area: Area, numbers: np.ndarray) -> np.ndarray:
    """Repeats an item for each area as one float32 for each number."""
    rows = areas.astype(np.float32).repeat(area[0], 0)[: len(numbers)]
    return rows.repeat(area[1] or numbers.shape[1], 1)


_FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "group_size": 128,
    "quant_method": "gptq",
    "sym": True,
}
QUANTIZERS = {
    "fp8-blocks": Quantizer(_FP8_BLOCKS, lambda x: _float8(x, (128, 128), "weight_scale_inv")),
    "fp8-channels": Quantizer(
        compressed("float-quantized", type="float"), lambda x: _float8(x, (1, 0), "weight_scale")
    ),
    "w8a16": Quantizer(compressed("pack-quantized"), lambda x: _packed(x, 8, (1, 0))),
    "w4a16": Quantizer(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
        lambda x: _packed(x, 4, _GROUP),
    ),
    "awq": Quantizer(_AWQ, _awq),
    "gptq": Quantizer(_GPTQ, _gptq),
}
"""Formats by name: FP8 in blocks of 128 x 128 and per channel, compressed-tensors' W8A16 per
channel and W4A16 in groups of 128, AWQ and GPTQ of 4 bits in groups of 128."""
