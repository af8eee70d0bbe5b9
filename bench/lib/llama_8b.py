"""Shapes of the GPU benchmarks: Llama 3.1 8B's and 70B's.

Weights are random: valid for speed, never for quality.
"""

from dataclasses import replace

from jsparse.models.config import Llama3Rope, ModelConfig

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling=Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)
LLAMA_70B = replace(
    LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)

# Measured read bandwidths, bytes/s (XLA sums 2 GB); floors are bytes divided by these. Other
# devices use the H200's.
READ_BANDWIDTHS = {"NVIDIA H100 80GB HBM3": 3.19e12, "NVIDIA H200": 4.4e12}
READ_BANDWIDTH = READ_BANDWIDTHS["NVIDIA H200"]


def key_constants(spec):
    """Returns constants with the shapes of a model of these sizes."""
    import jax.numpy as jnp

    from jsparse.cache.key_constants import KeyConstants

    shape = spec.num_layers, spec.num_kv_heads
    return KeyConstants(
        jnp.zeros((*shape, spec.head_dim)),
        jnp.ones((*shape, spec.head_dim // 2)),
        jnp.ones(spec.head_dim // 2),
    )._asdict()


def boundary_constants():
    """Returns constants that cut random tokens into chunks as long as a tokenizer's in prose.

    Chunks of 8 to 16 tokens have 13.6 on average (jsparse.policies.clusters.chunking).
    """
    import jax.numpy as jnp
    import numpy as np

    from jsparse.policies.clusters.boundary_classes import STARTS_WITH_BLANK

    rng, size = np.random.default_rng(0), LLAMA_8B.vocab_size
    classes = rng.choice(4, size, p=(0.91, 0.01, 0.04, 0.04))
    flags = STARTS_WITH_BLANK * (rng.random(size) < 0.6)
    table = jnp.asarray(np.stack([classes, flags], axis=1), jnp.uint8)
    return {"boundary_classes": table, "boundary_classes_or_none": table}


def state_after_prompt(policy, spec, view):
    """Returns the policy's state after a prompt of one chunk that filled the cache.

    The prompt's tokens and its last queries, which some policies use, are random.
    """
    from jsparse.benchmark import random_cache

    return random_cache.state_after_prompt(policy, spec, view, LLAMA_8B.vocab_size)


def huggingface_model(config=LLAMA_8B, device="cuda"):
    """Returns a transformers model of this shape: random weights through PyTorch's SDPA.

    Weights are bfloat16 on a GPU and float32 on a CPU, as in jsparse.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(shape).eval()
