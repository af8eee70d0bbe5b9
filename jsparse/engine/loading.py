"""Defines `load_engine`, which LLM and AsyncEngine share."""

import os
from typing import Any

from jsparse.engine.core import Engine
from jsparse.engine.options import EngineOptions
from jsparse.models.checkpoint import Params, given_params
from jsparse.names import ENGINE, takes
from jsparse.policy import AnyPolicy


@takes(ENGINE, more=EngineOptions)
def load_engine(
    model: str | os.PathLike[str] | Params,
    policy: AnyPolicy | str = "dense",
    *,
    dtype: Any = None,
    weights: str | None = None,
    revision: str | None = None,
    tokenizer: Any = None,
    chat_template: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int | None = None,
    kv_cache_dtype: str | None = None,
    **options: Any,
) -> Engine:
    """Loads a model and returns an engine for it.

    Args:
        model: an argument of `jsparse.load`, or its result.
        policy: the policy or its expression.
        dtype: "float32", "bfloat16" or "float16"; None: bfloat16 on a GPU and float32 elsewhere. It
            and the next four are for `jsparse.load`.
        weights: "q8_0" stores matrices in blocks of 8 bits, "plain" as numbers of `dtype`; None:
            as the file has them where kernels read them.
        revision: a branch, tag or commit, for Hub ids.
        tokenizer: a fast transformers tokenizer, or a jsparse one, instead of the model's.
        chat_template: a file with a Jinja template, instead of the tokenizer's.
        tensor_parallel_size: the number of devices that the model is spread over, each with some of
            its heads; None: one, or those over which `jsparse.load` has spread it. The devices may
            belong to several processes (jax.distributed), which all create the same engine: all but
            process 0 then work for it, and exit when it does.
        kv_cache_dtype: "int8" stores K and V in 8 bits; "auto": in the model's type; None: as the
            loaded model does, or "auto".
        options: those of `EngineOptions`.

    Raises:
        ValueError: an option is refused, the policy cannot be served, or memory is too small.
        TypeError: there is no option of that name.
    """
    checked = EngineOptions(**options)  # before anything is loaded
    params = given_params(
        model,
        dtype=dtype,
        weights=weights,
        revision=revision,
        tokenizer=tokenizer,
        chat_template=chat_template,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    return Engine(params, policy, checked)
