"""Reads the sizes of a mixture of experts from config.json and GGUF metadata."""

from collections.abc import Mapping
from typing import Any

from jsparse.models.config import Experts, refuse, require


def experts_from_hf(config: dict[str, Any], *, shared: bool) -> Experts:
    """Returns the experts of a config.json; with `shared`, also the size of the shared expert.

    ValueError if some layers have a plain MLP.
    """
    refuse(config, "decoder_sparse_step", (1,))
    if layers := config.get("mlp_only_layers"):
        raise ValueError(
            f"config field mlp_only_layers={layers}: must be empty, since all layers have experts"
        )
    normalized = config.get("norm_topk_prob", False)
    refuse({"norm_topk_prob": normalized}, "norm_topk_prob", (False, True))
    # transformers 5 also has num_local_experts, Mixtral's name of the field
    number = config.get("num_experts", config.get("num_local_experts"))
    return Experts(
        number=require({"num_experts": number}, "num_experts"),
        chosen=require(config, "num_experts_per_tok"),
        intermediate_size=require(config, "moe_intermediate_size"),
        normalized=bool(normalized),
        shared_size=require(config, "shared_expert_intermediate_size") if shared else 0,
    )


def experts_from_gguf(fields: Mapping[str, Any], *, shared: bool) -> Experts:
    """Returns the experts of a GGUF file, whose keys lack the architecture's prefix.

    No key of these files states whether weights are normalized: those of Qwen3-MoE are, and those
    of Qwen2-MoE, which has a shared expert, are not, as in llama.cpp.
    """
    fields = dict(fields)
    refuse(fields, "expert_weights_scale", (0.0, 1.0))
    refuse(fields, "expert_weights_norm", (not shared,))
    return Experts(
        number=require(fields, "expert_count"),
        chosen=require(fields, "expert_used_count"),
        intermediate_size=require(fields, "expert_feed_forward_length"),
        normalized=not shared,
        shared_size=require(fields, "expert_shared_feed_forward_length") if shared else 0,
    )
