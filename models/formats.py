"""Reads the parts of a model from a folder or a GGUF file."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.models import orbax_files
from jsparse.models.config import ModelConfig
from jsparse.models.config_files import PICKLES, ROPE_FACTORS, folder_config, gguf_config
from jsparse.models.constants_file import read_constants
from jsparse.models.families import FAMILIES, Family, Names
from jsparse.models.generation_config import read_generation_config, read_gguf_settings
from jsparse.models.gguf import GGUFFile
from jsparse.models.indexer import INDEXER, is_of_indexer, read_indexer, require_fit
from jsparse.models.quantization_config import scheme_of
from jsparse.models.quantized_safetensors import QuantizedSafetensors
from jsparse.models.safetensors_files import SafetensorsFolder, read_json
from jsparse.models.spreading import Spreading
from jsparse.models.tokenizer import Tokenizer, as_tokenizer
from jsparse.models.tokenizer_files import stated_ends
from jsparse.models.transformer import Weights
from jsparse.models.weight_plan import Planned, plan_weights
from jsparse.models.weight_reading import read_weights
from jsparse.models.weights import OnProgress, TensorStore, Weight, list_weights

WEIGHTS, CONSTANTS = "weights", "constants.safetensors"  # in a folder written by `save`
_ADAPTER = "adapter_config.json"
# tensors in files that the decoder does not read: a tied head, and part of the config
UNUSED = {"lm_head.weight", ROPE_FACTORS}


class LoadOptions(NamedTuple):
    """The options of `load` that affect the weights.

    Attributes:
        dtype: the dtype of numbers.
        weights: a result of `parse_weights`.
        ranks: the number of devices.
        on_progress: the callable of `load`.
    """

    dtype: Any
    weights: str = "auto"
    ranks: int = 1
    on_progress: OnProgress | None = None

    def spreading(self, config: ModelConfig) -> Spreading | None:
        """Returns how the model is spread over devices, or None for one device."""
        return Spreading(config, self.ranks) if self.ranks > 1 else None


class ModelParts(NamedTuple):
    """Fields of jsparse.models.checkpoint.Params, documented there."""

    weights: Weights
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_defaults: dict[str, Any]
    constants: dict[str, jax.Array]
    mesh: jax.sharding.Mesh | None


def read_folder(folder: Path, tokenizer: Any, options: LoadOptions) -> ModelParts:
    """Reads a folder in Hugging Face's format, or one written by `save`."""
    config, is_saved = folder_config(folder)
    family = FAMILIES[config.family]
    defaults = read_generation_config(folder)
    if tokenizer is not None:
        tokenizer = as_tokenizer(tokenizer, stated_ends(folder))
    elif (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder)
    constants = {}
    if is_saved:
        spreading, own = options.spreading(config), folder / WEIGHTS
        what = config, family.hf_names, options.weights, options.dtype, options.ranks
        planned = orbax_files.plan_saved(own, *what)
        how = options.dtype, options.on_progress, spreading
        weights = orbax_files.load_weights(own, planned, *how)
        constants = read_constants(folder / CONSTANTS)
    else:
        store = _safetensors(folder)
        config = with_own_head(config, family, store)
        spreading = options.spreading(config)
        weights = read_store(store, config, family.hf_names, options, spreading)
        constants = _own_indexer(store, config)
    return _parts(spreading, weights, config, tokenizer, defaults, constants)


def read_gguf(path: Path, tokenizer: Any, options: LoadOptions) -> ModelParts:
    """Reads a GGUF file."""
    store = GGUFFile(path)
    config = gguf_config(store)
    family, spreading = FAMILIES[config.family], options.spreading(config)
    if tokenizer is not None:
        tokenizer = as_tokenizer(tokenizer)
    elif "tokenizer.ggml.tokens" in store.metadata:
        tokenizer = Tokenizer.from_gguf(store.metadata)
    what = store, config, family.gguf_names, options, spreading
    weights = read_store(*what, interleaved=family.gguf_interleaved)
    defaults = read_gguf_settings(store.metadata, path)
    return _parts(spreading, weights, config, tokenizer, defaults, {})


def read_store(
    store: TensorStore,
    config: ModelConfig,
    names: Names,
    options: LoadOptions,
    spreading: Spreading | None = None,
    *,
    interleaved: bool = False,
) -> Weights:
    """Reads the decoder's tree from tensors, under a family's names for a format.

    Raises:
        ValueError: tensors are missing, misshapen or unknown, do not fit in memory, or do not fit
            Q8_0, which the options ask for.
    """
    what = config, names, options.weights, options.dtype, options.ranks
    planned = _plan_store(store, *what, interleaved=interleaved)
    return read_weights(planned, store, options.dtype, options.on_progress, spreading)


def plan_files(path: Path, option: str, dtype: Any, ranks: int = 1) -> list[Planned] | None:
    """Returns the weights that loading a folder or GGUF file would give, from its headers alone.

    None: the folder has no weights, like the small files of a Hub id. `option` is a result of
    `parse_weights` for the dtype. Raises the errors of loading that headers show.
    """
    if not path.is_dir():
        store = GGUFFile(path)
        config = gguf_config(store)
        family = FAMILIES[config.family]
        what = config, family.gguf_names, option, dtype, ranks
        return _plan_store(store, *what, interleaved=family.gguf_interleaved)
    config, is_saved = folder_config(path)
    what = config, FAMILIES[config.family].hf_names, option, dtype, ranks
    if is_saved:
        return orbax_files.plan_saved(path / WEIGHTS, *what)
    if not any(path.glob("*.safetensors")):
        return None
    return _plan_store(_safetensors(path), *what)


def _plan_store(
    store: TensorStore,
    config: ModelConfig,
    names: Names,
    option: str,
    dtype: Any,
    ranks: int,
    *,
    interleaved: bool = False,
) -> list[Planned]:
    """Lists and plans the weights of a store that has exactly their tensors."""
    what = store.path, len(store.shapes), config, names
    weights = list_weights(*what, interleaved=interleaved)
    _check_tensors(weights, store)
    return plan_weights(weights, store, option, dtype, ranks)


def with_own_head(config: ModelConfig, family: Family, store: TensorStore) -> ModelConfig:
    """Returns the config, untied if the checkpoint's head differs from its embedding.

    transformers 5 does the same: a head equal to the embedding stays tied.
    """
    (head,), (embedding,) = family.hf_names["lm_head"], family.hf_names["embed"]
    if not config.tie_word_embeddings or not {head, embedding} <= store.shapes.keys():
        return config
    if store.shapes[head] == store.shapes[embedding] and np.array_equal(
        store.read(head), store.read(embedding)
    ):
        return config
    return dataclasses.replace(config, tie_word_embeddings=False)


def _own_indexer(store: TensorStore, config: ModelConfig) -> dict[str, jax.Array]:
    """Returns the indexer in a checkpoint, as constants of the model; {}: it has none."""
    if not any(map(is_of_indexer, store.shapes)):
        return {}
    indexer = read_indexer(store.read, store.shapes, str(store.path))
    sizes = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    require_fit(indexer, str(store.path), *sizes)
    return dict(zip(INDEXER, map(jnp.asarray, indexer), strict=True))


def _parts(
    spreading: Spreading | None, weights: Weights, config: ModelConfig, *others: Any
) -> ModelParts:
    """Returns the parts, with a rank's config if the model is spread."""
    if spreading is None:
        return ModelParts(weights, config, *others, mesh=None)
    return ModelParts(weights, spreading.config, *others, mesh=spreading.mesh)


def _safetensors(folder: Path) -> TensorStore:
    if not any(folder.glob("*.safetensors*")):
        if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES):
            raise ValueError(
                f"{folder} holds {pickles[0]}: pickle checkpoints are never loaded, only "
                "safetensors"
            )
        raise FileNotFoundError(f"{folder} holds no safetensors file")
    if (folder / _ADAPTER).is_file():
        raise ValueError(
            f"{folder} holds {_ADAPTER}: must be a model without an adapter; merge it into the "
            "weights first"
        )
    scheme = scheme_of(read_json(folder / "config.json"))
    return SafetensorsFolder(folder) if scheme is None else QuantizedSafetensors(folder, scheme)


def _check_tensors(weights: list[Weight], store: TensorStore) -> None:
    """Raises ValueError unless the store has exactly the tensors of `weights`."""
    shapes = {source.name: source.shape for weight in weights for source in weight.sources}
    if missing := shapes.keys() - store.shapes.keys():
        raise ValueError(
            f"{store.path} lacks {_some(missing)}: the config asks for {len(shapes)} tensors"
        )
    for name, shape in shapes.items():
        if _squeezed(store.shapes[name]) != _squeezed(shape):
            raise ValueError(
                f"{store.path}: {name} has shape {store.shapes[name]}: the config asks for {shape}"
            )
    others = store.shapes.keys() - shapes.keys() - UNUSED
    if extra := {
        name
        for name in others
        if not name.endswith("rotary_emb.inv_freq") and not is_of_indexer(name)
        # AutoGPTQ gives every linear map a bias
        if not name.endswith(".bias") or store.read(name).any()
    }:
        raise ValueError(f"{store.path} holds {_some(extra)}, which this model has no place for")


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of size 1, which GGUF files leave off."""
    return tuple(size for size in shape if size != 1)


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:4]
    return ", ".join(first) + (
        f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    )
