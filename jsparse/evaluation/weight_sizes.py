"""Counts a model's weights, and describes the formats in which they are loaded."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsparse.models.config import ModelConfig
from jsparse.models.families import FAMILIES
from jsparse.models.quantized import all_q8_0, name_of
from jsparse.models.spreading import own_size
from jsparse.models.weight_plan import NO_EXPERTS, Planned, forms_of, require_fit
from jsparse.models.weights import Weight, list_weights
from jsparse.pallas_kernels.weight_blocks import FORMS, Form

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LoadedWeights(NamedTuple):
    """The weights of a model as loaded.

    Attributes:
        device_bytes: their bytes on each device.
        forms: the formats of matrices in blocks.
        formats: a dict per kind of matrix: "stored", its types in the files; "format", that in
            which it is loaded; "matrices", their number; "bytes", those of the whole model;
            "reason", why they are widened, or "". Empty if the files are not there.
    """

    device_bytes: int
    forms: Collection[Form]
    formats: list[dict[str, Any]]


def planned_weights(
    planned: Sequence[Planned], config: ModelConfig, ranks: int, dtype: str
) -> LoadedWeights:
    """Describes weights whose files were read; see jsparse.models.weight_plan."""
    formats: dict[tuple[str, str, str], dict[str, Any]] = {}
    device_bytes = 0
    for each in planned:
        size = each.nbytes(dtype)
        device_bytes += own_size(config, ranks, each.weight.path, size)
        if not (each.weight.is_matrix or each.weight.experts):
            continue
        stored = " and ".join(dict.fromkeys(each.kinds))
        kind = stored, dtype if each.form is None else name_of(each.form), each.reason
        row = dict(zip(("stored", "format", "reason"), kind, strict=True))
        row = formats.setdefault(kind, row | {"matrices": 0, "bytes": 0})
        row["matrices"] += 1
        row["bytes"] += size
    return LoadedWeights(device_bytes, forms_of(planned), list(formats.values()))


def assumed_weights(config: ModelConfig, ranks: int, dtype: str, option: str) -> LoadedWeights:
    """Describes weights of which only the config was read: numbers, or Q8_0 if the option asks.

    Raises ValueError if they do not fit Q8_0.
    """
    size = own_weight_bytes(config, ranks, dtype, option)
    if option != "q8_0":
        return LoadedWeights(size, (), [])
    names = FAMILIES[config.family].hf_names
    if config.experts is not None:
        raise ValueError(f"weights='q8_0': the model {NO_EXPERTS}")
    require_fit(list_weights(Path(), config.num_layers, config, names), all_q8_0, ranks)
    return LoadedWeights(size, (FORMS["q8_0"],), [])


def own_weight_bytes(config: ModelConfig, ranks: int, dtype: str, option: str) -> int:
    """Returns the bytes of the weights of each rank, as numbers or, for "q8_0", in blocks."""
    count = num_own_parameters(config, ranks)
    if option != "q8_0":
        return count * ITEM_BYTES[dtype]
    vectors = num_parameters(config.of_rank(ranks), lambda weight: not weight.is_matrix)
    blocks = (count - vectors) // FORMS["q8_0"].group
    return vectors * ITEM_BYTES[dtype] + blocks * FORMS["q8_0"].nbytes(1, FORMS["q8_0"].group)


def num_active_parameters(config: ModelConfig) -> int:
    """Counts the values that a token is multiplied with: of experts, only those of its own."""
    if (e := config.experts) is None:
        return num_parameters(config)
    of_experts = num_parameters(config, lambda weight: weight.experts > 0)
    return num_parameters(config) - of_experts + of_experts * e.chosen // e.number


def num_own_parameters(config: ModelConfig, ranks: int) -> int:
    """Counts the values in the weights of each rank (jsparse.ranks)."""
    heads = 0 if config.tie_word_embeddings else config.hidden_size * config.vocab_size
    return num_parameters(config.of_rank(ranks)) - heads + heads // config.vocab_parts(ranks)


def num_parameters(config: ModelConfig, counted: Callable[[Weight], bool] = lambda _: True) -> int:
    """Counts the values in the weights, or in some; a tied embedding counts once."""
    names = FAMILIES[config.family].hf_names

    def count(layers: int) -> int:
        shallow = dataclasses.replace(config, num_layers=layers, windows=())
        return sum(
            math.prod(weight.shape)
            for weight in list_weights(Path(), layers, shallow, names)
            if counted(weight)
        )

    # layers are alike: listing all of an absurd number of them would take forever
    return count(1) + (config.num_layers - 1) * (count(2) - count(1))
