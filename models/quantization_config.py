"""Reads how a safetensors checkpoint is quantized from the `quantization_config` of config.json.

Sources: the fields of transformers (fp8), AutoAWQ and GPTQModel, and those of compressed-tensors.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jsparse.models.config import refuse, require

FIELDS = ("quantization_config", "compression_config")  # the second is an older name
GROUP = 32  # a multiple of it has one scale


class Scheme(NamedTuple):
    """How the quantized matrices of a checkpoint are stored.

    Attributes:
        layout: "values": a code per item; "packed", "gptq" or "awq": codes in 32-bit integers
            (jsparse.models.quantized_layouts).
        bits: bits of a code.
        areas: the numbers of rows and columns that share a scale, 0 for all; if a file may have one
            of several, its shapes tell which.
        zeros: whether codes have zero points.
        floats: whether codes are float8_e4m3fn instead of integers.
        less_one: whether the file has zero points less one.
    """

    layout: str
    bits: int
    areas: tuple[tuple[int, int], ...]
    zeros: bool = False
    floats: bool = False
    less_one: bool = False

    @property
    def per_integer(self) -> int:
        """The codes in a 32-bit integer."""
        return 32 // self.bits

    @property
    def middle(self) -> int:
        """The zero point of a symmetric scheme; codes of 8 bits are signed."""
        return 8 if self.bits == 4 else 0

    @property
    def dtype(self) -> str:
        """The dtype of codes in the file, by its name in safetensors."""
        if self.layout != "values":
            return "I32"
        return "F8_E4M3" if self.floats else "I8"


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme that a config.json states, or None for a checkpoint of plain numbers.

    Activations stay in their dtype here, so it accepts any quantization of them. It ignores the
    lists of modules that are not quantized: the tensors of a module tell.

    Raises:
        ValueError: the scheme is not supported; the message names the field and its value.
    """
    field = next((field for field in FIELDS if config.get(field)), None)
    if field is None:
        return None
    fields = _fields(config, field)
    method = fields.get(f"{field}.quant_method")
    if method is None and field == FIELDS[1]:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"config field {field}.quant_method={method!r} is not supported: must be one of "
            f"{list(_METHODS)}; or use a GGUF file, or plain weights"
        )
    return _METHODS[method](fields, field)


def _fp8(fields: dict[str, Any], at: str) -> Scheme:
    """Reads the fields of transformers' and vLLM's `fp8`: one scale per tensor, row or block."""
    refuse(fields, f"{at}.fmt", ("e4m3", "float8_e4m3fn"))
    refuse(fields, f"{at}.activation_scheme", ("dynamic", "static"))
    key = f"{at}.weight_block_size"
    if fields.get(key) is not None:
        return Scheme("values", 8, (_area(fields, key),), floats=True)
    return Scheme("values", 8, ((0, 0), (1, 0)), floats=True)


def _awq(fields: dict[str, Any], at: str) -> Scheme:
    """Reads AutoAWQ's fields: `w_bit` and `q_group_size` are older names."""
    for name in ("bits", "w_bit"):
        refuse(fields, f"{at}.{name}", (4,))
    for name in ("version", "checkpoint_format"):
        refuse(fields, f"{at}.{name}", ("gemm", "GEMM"))
    refuse(fields, f"{at}.zero_point", (True,))
    refuse(fields, f"{at}.backend", ("auto", "autoawq"))
    older = f"{at}.q_group_size"
    group = _group(fields, older if older in fields else f"{at}.group_size")
    return Scheme("awq", 4, ((1, group),), zeros=True)


def _gptq(fields: dict[str, Any], at: str) -> Scheme:
    """Reads GPTQModel's and AutoGPTQ's fields; `desc_act` is left to the tensors `g_idx`."""
    bits = _bits(fields, f"{at}.bits")
    for name in ("checkpoint_format", "format"):
        refuse(fields, f"{at}.{name}", ("gptq", "gptq_v2"))
    refuse(fields, f"{at}.is_marlin_format", (False,))
    refuse(fields, f"{at}.pack_dtype", ("int32",))
    # GPTQModel: "-:" before the pattern of modules that are not quantized
    key = f"{at}.dynamic"
    overrides = [pattern.removeprefix(f"{key}.") for pattern in _fields(fields, key)]
    if others := [pattern for pattern in overrides if not pattern.startswith("-:")]:
        raise ValueError(
            f"config field {key} has {others[0]!r}: modules with formats of their own are not "
            "supported"
        )
    second = "gptq_v2" in (fields.get(f"{at}.checkpoint_format"), fields.get(f"{at}.format"))
    return Scheme(
        "gptq",
        bits,
        ((1, _group(fields, f"{at}.group_size")),),
        zeros=fields.get(f"{at}.sym") is not True,
        less_one=not second,
    )


def _compressed_tensors(fields: dict[str, Any], at: str) -> Scheme:
    """Reads the fields of compressed-tensors."""
    sparsity = _fields(fields, f"{at}.sparsity_config")
    refuse(sparsity, f"{at}.sparsity_config.format", ("dense",))
    refuse(fields, f"{at}.transform_config", ({},))
    groups = _fields(fields, f"{at}.config_groups")
    schemes = {_of_group(fields, at, _fields(groups, key), key) for key in groups} - {None}
    first, *others = schemes or {None}
    if first is None or others:
        raise ValueError(
            f"config field {at}.config_groups has {len(schemes)} formats of weights: must have 1"
        )
    return first


def _of_group(fields: dict[str, Any], at: str, group: dict[str, Any], key: str) -> Scheme | None:
    """Returns the scheme of one group of modules, or None if only activations are quantized."""
    own = key + ".format"
    format_key = own if group.get(own) is not None else f"{at}.format"
    format_ = require(group if format_key == own else fields, format_key)
    key += ".weights"
    weights = _fields(group, key)
    if not weights:
        return None
    refuse(weights, f"{key}.dynamic", (False,))
    refuse(weights, f"{key}.actorder", (False, "static", "weight"))
    refuse(weights, f"{key}.type", ("int", "float"))
    floats = require(weights, f"{key}.type") == "float"
    refuse(weights, f"{key}.symmetric", (True, False))
    symmetric = weights.get(f"{key}.symmetric") is not False
    area = _strategy(weights, key)
    kinds = {
        "pack-quantized": ("packed", (False,)),
        "int-quantized": ("values", (False,)),
        "float-quantized": ("values", (True,)),
        "naive-quantized": ("values", (False, True)),
    }
    refuse({format_key: format_}, format_key, tuple(kinds))
    layout, types = kinds[format_]
    bits = _bits(weights, f"{key}.num_bits", (4, 8) if layout == "packed" else (8,))
    if floats not in types or (floats and not symmetric):
        raise ValueError(
            f"config field {key}.type={weights[f'{key}.type']!r} with symmetric={symmetric!r} is "
            f"not supported in format {format_!r}"
        )
    return Scheme(layout, bits, (area,), zeros=not symmetric, floats=floats)


def _strategy(weights: dict[str, Any], key: str) -> tuple[int, int]:
    """Returns the numbers of rows and columns that share a scale; 0: all."""
    strategy = require(weights, f"{key}.strategy")
    refuse(weights, f"{key}.strategy", ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return _area(weights, f"{key}.block_structure")
    if strategy == "group":
        return 1, _group(weights, f"{key}.group_size")
    return (0, 0) if strategy == "tensor" else (1, 0)


def _bits(fields: dict[str, Any], key: str, allowed: Iterable[int] = (4, 8)) -> int:
    require(fields, key)
    refuse(fields, key, tuple(allowed))
    return fields[key]


def _group(fields: dict[str, Any], key: str) -> int:
    """Returns a group's size; 0, which stands for a whole row, for -1."""
    size = require(fields, key)
    if size == -1:
        return 0
    if type(size) is not int or size < 1 or size % GROUP:
        raise ValueError(f"config field {key}={size!r}: must be -1 or a multiple of {GROUP}")
    return size


def _area(fields: dict[str, Any], key: str) -> tuple[int, int]:
    """Returns the rows and columns of a block."""
    area = require(fields, key)
    is_pair = isinstance(area, list) and len(area) == 2
    if not is_pair or any(type(n) is not int or n < 1 for n in area) or area[1] % GROUP:
        raise ValueError(
            f"config field {key}={area!r}: must be two positive numbers, the second a multiple of "
            f"{GROUP}"
        )
    return area[0], area[1]


def _fields(parent: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the fields of an object by their whole paths; {} if there is none."""
    value = parent.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config field {key}={value!r}: must be an object")
    return {f"{key}.{name}": field for name, field in value.items()}


_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}
