"""How much memory and time does each weight format take on one model, and how close is it to bf16?

The model is a GGUF file. Its numbers in bfloat16 are the reference, and also the source of the
other files, which this script writes into a temporary folder, one at a time:

    bf16                the numbers, in safetensors
    source              the model's own file, its formats kept
    q8_0                the same file with --weights q8_0: 8-bit blocks made while loading
    gguf-q8_0, gguf-q4_0, fp8-blocks, fp8-channels, w8a16, w4a16, awq, gptq
                        files of these formats, each number rounded to the nearest code (RTN),
                        without the calibration of a format's own tools (bench.lib.quantized_files)

Each format has its own process. It loads the file twice, from the system's file cache and without
the tokenizer; the first time includes the compilation of conversions, and gives the peak of device
memory. It then scores --windows x --length tokens of the text of `jsparse eval` with
`jsparse.logits`: KL(bf16 || format) of the next token, and how often both have the same most likely
one. Log-probabilities of both are rounded to float16, in which the reference is kept on disk. Last,
it times decode steps of dense attention, as `jsparse bench` does, at --rows x --context tokens.

    python -m bench.weight_formats --model model-Q4_K_M.gguf --json build/weight_formats.json

--tiny measures small sizes, and all formats in this process.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType

from bench.lib.arguments import report_parser
from bench.lib.environment import available_cores, describe
from bench.lib.quantized_files import QUANTIZERS, Quantizer, write_gguf, write_safetensors
from bench.lib.subprocesses import run_child, spread, write_report

LOADS = 2
TIMEOUT_S = 300


@dataclass(frozen=True)
class Source:
    """The model's plain numbers in bfloat16.

    Attributes:
        path: its GGUF file.
        metadata: the values of that file by key.
        config: the fields of a config.json.
        tensors: the tensors under GGUF's names, in the file's order of rows.
        hf_tensors: the same under Hugging Face's names, in their order.
    """

    path: Path
    metadata: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    hf_tensors: dict[str, np.ndarray]


class Format(NamedTuple):
    """One row of the table.

    Attributes:
        write: returns the path of the model, written into a folder if it is not the source.
        weights: the option of `jsparse.load`.
    """

    write: Callable[[Source, Path], Path]
    weights: str = "auto"


def own_file(source: Source, folder: Path) -> Path:
    """Returns the source's file."""
    return source.path


def safetensors(quantizer: Quantizer | None, source: Source, folder: Path) -> Path:
    """Writes a folder of safetensors."""
    return write_safetensors(folder / "model", source.config, source.hf_tensors, quantizer)


def gguf(kind: GGMLQuantizationType, source: Source, folder: Path) -> Path:
    """Writes a GGUF file."""
    return write_gguf(folder / "model.gguf", source.metadata, source.tensors, kind)


REFERENCE = "bf16"
FORMATS = {
    REFERENCE: Format(partial(safetensors, None), "plain"),
    "source": Format(own_file),
    "q8_0": Format(own_file, "q8_0"),
    "gguf-q8_0": Format(partial(gguf, GGMLQuantizationType.Q8_0)),
    "gguf-q4_0": Format(partial(gguf, GGMLQuantizationType.Q4_0)),
    **{name: Format(partial(safetensors, each)) for name, each in QUANTIZERS.items()},
}


def read_source(path: Path) -> Source:
    """Reads a GGUF file and rounds its numbers to bfloat16, without a device.

    Raises:
        ValueError: the file is not a GGUF file, or a config.json of plain fields cannot describe
            the model.
    """
    from jsparse.models.config_files import checked_path, gguf_config
    from jsparse.models.families import FAMILIES
    from jsparse.models.gguf import GGUFFile
    from jsparse.models.weight_reading import in_order
    from jsparse.models.weights import list_weights

    if not path.is_file():
        raise ValueError(f"model={str(path)!r}: must be a GGUF file")
    store = GGUFFile(checked_path(path, path))
    config = gguf_config(store)
    for name in ("rope_scaling", "rope_factors", "experts"):
        if (value := getattr(config, name)) is not None:
            raise ValueError(f"model={str(path)!r} has {name}={value}: must be a model without it")
    family, of_file = FAMILIES[config.family], (path, len(store.shapes), config)
    listed = [
        [source for weight in weights for source in weight.sources]
        for weights in (
            list_weights(*of_file, family.gguf_names, interleaved=family.gguf_interleaved),
            list_weights(*of_file, family.hf_names),
        )
    ]

    def numbers(name: str) -> np.ndarray:
        return store.read(name).astype(ml_dtypes.bfloat16)

    with ThreadPoolExecutor(available_cores()) as pool:
        tensors = dict(zip(store.shapes, pool.map(numbers, store.shapes), strict=True))
    return Source(
        path,
        store.metadata,
        hf_fields(config),
        tensors,
        {hf.name: in_order(own, tensors[own.name]) for own, hf in zip(*listed, strict=True)},
    )


def hf_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of the config.json of a ModelConfig without scaled RoPE and experts."""
    return {
        "model_type": config.family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def measured(name: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one format in this process.

    Args:
        name: a key of FORMATS.
        path: the model in this format.
        options: those of `main`, with the path `reference` of the log-probabilities in bf16, which
            REFERENCE writes.
    """
    import jax

    import jsparse
    from jsparse.benchmark.steps import time_steps
    from jsparse.builder import dense
    from jsparse.evaluation import texts
    from jsparse.models.gguf import GGUFFile
    from jsparse.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(GGUFFile(options.model).metadata)
    tokens = excerpts(tokenizer.encode(texts.read(None)), options.windows, options.length + 1)
    seconds, peaks, params = [], [], None
    for _ in range(LOADS):
        del params
        began = time.perf_counter()
        params = jsparse.load(path, weights=FORMATS[name].weights, tokenizer=tokenizer)
        jax.block_until_ready(params.weights)
        seconds.append(time.perf_counter() - began)
        stats = jax.local_devices()[0].memory_stats() or {}
        peaks.append(stats.get("peak_bytes_in_use"))
    assert params is not None
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    if name == REFERENCE:
        write_reference(params, tokens, options.reference)
    closeness = distance(params, tokens, options.reference)
    steps = [
        time_steps(params, dense(), batch=rows, context=options.context) for rows in options.rows
    ]
    kept = ("batch", "context", "ms", "kernels")
    return {
        "device": jax.local_devices()[0].device_kind,
        "types": params.types,
        "file_bytes": file_bytes(path),
        "weight_bytes": weight_bytes,
        # later peaks may be those of other work
        "load_peak_bytes": peaks[0],
        "load_seconds": spread(seconds),
        **closeness,
        "steps": [{key: row[key] for key in kept} for row in steps],
    }


def excerpts(tokens: Sequence[int], count: int, length: int) -> np.ndarray:
    """Returns int32 [count, length], tokens from all parts of a text.

    Raises:
        ValueError: the text is too short.
    """
    if count * length > len(tokens):
        raise ValueError(
            f"windows={count} of {length} tokens: must fit in the {len(tokens)} of the text"
        )
    starts = (len(tokens) * i // count for i in range(count))
    return np.array([tokens[start : start + length] for start in starts], np.int32)


def log_probabilities(params: Any, tokens: np.ndarray) -> Any:
    """Returns those of the token after each of `tokens` [T], float16 [T, V] on the device."""
    import jax

    import jsparse

    return jax.nn.log_softmax(jsparse.logits(params, tokens)[0]).astype("float16")


def write_reference(params: Any, tokens: np.ndarray, path: Path) -> None:
    """Writes the log-probabilities of all excerpts, float16 [windows, length, V]."""
    shape = (len(tokens), tokens.shape[1] - 1, params.config.vocab_size)
    file = np.lib.format.open_memmap(path, "w+", np.float16, shape)
    for nth, excerpt in enumerate(tokens):
        file[nth] = log_probabilities(params, excerpt[:-1])
    file.flush()


def distance(params: Any, tokens: np.ndarray, path: Path) -> dict[str, Any]:
    """Returns the means of KL(reference || model) in nats, also of each excerpt, and of agreement.

    `perplexity` is the model's own, of the excerpts.
    """
    import jax

    from jsparse.evaluation.closeness import distances, perplexity

    found = []
    for exact, excerpt in zip(np.load(path, mmap_mode="r"), tokens, strict=True):
        logs = jax.device_put(np.asarray(exact)), log_probabilities(params, excerpt[:-1])
        numbers = (each.astype("float32") for each in logs)
        found.append(jax.device_get(distances(*numbers, excerpt[1:])))
    kl, agreement, logprob = map(np.stack, zip(*found, strict=True))
    return {
        "kl": float(kl.mean()),
        "kl_of_excerpts": kl.mean(1).tolist(),
        "agreement": float(agreement.mean()),
        "perplexity": float(perplexity(logprob)),
    }


def file_bytes(path: Path) -> int:
    """Returns the size of a GGUF file, or of the safetensors in a folder."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


@contextmanager
def model_file(source: Source, name: str, folder: Path) -> Iterator[Path]:
    """Writes a format's files, and deletes them at the end."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield FORMATS[name].write(source, Path(own))


def in_child(name: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns `measured` from a process of its own."""
    words = ["--child", name, str(path), "--model", str(options.model)]
    words += ["--reference", str(options.reference), "--rows", *map(str, options.rows)]
    for option in ("context", "windows", "length"):
        words += [f"--{option}", str(getattr(options, option))]
    return run_child("bench.weight_formats", words, timeout_s=TIMEOUT_S)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Formats the results, a line per format; those that failed come last."""
    sizes = [f"ms {step['batch']} x {step['context']}" for step in results[0]["steps"]]
    head = ["format", "file GB", "GPU GB", "peak", "load s", *sizes, "KL", "top-1 %", "kept as"]
    lines, failed = [head], []
    for row in results:
        name = row["format"] + (" (RTN)" if row["rounded_to_nearest"] else "")
        if "error" in row:
            failed.append(f"{name} failed: {row['error'].strip().splitlines()[-1]}")
            continue
        peak = row["load_peak_bytes"]
        figures = [
            *(f"{row[key] / 1e9:.3f}" for key in ("file_bytes", "weight_bytes")),
            "-" if peak is None else f"{peak / row['weight_bytes']:.2f}x",
            f"{row['load_seconds']['median']:.2f}",
            *(f"{step['ms']['median']:.3f}" for step in row["steps"]),
            f"{row['kl']:.5f}",
            f"{100 * row['agreement']:.2f}",
        ]
        lines.append([name, *figures, row["types"]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [map(str.ljust, line, widths) for line in lines]
    return "\n".join(["  ".join(text).rstrip() for text in texts] + failed)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = report_parser("weight_formats", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=list(FORMATS),
        default=list(FORMATS),
        help="default: all; bf16 is always measured, first",
    )
    parser.add_argument("--context", type=int, help="tokens of a row (default 4096)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="default 1 8")
    parser.add_argument("--windows", type=int, help="excerpts to score (default 4)")
    parser.add_argument("--length", type=int, help="tokens of an excerpt (default 1024)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, in this process")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--child",
        nargs=2,
        metavar=("NAME", "PATH"),
        help="measure one format here and print a JSON line",
    )
    options = parser.parse_args(words)
    for name, usual, tiny in (("context", 4096, 64), ("windows", 4, 2), ("length", 1024, 32)):
        if getattr(options, name) is None:
            setattr(options, name, tiny if options.tiny else usual)
        elif getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Measures every format and prints a table; exits with 1 if one of them failed."""
    options = parsed(words)
    if options.child:
        name, path = options.child
        print(json.dumps(measured(name, Path(path), options)))
        return
    report: dict[str, Any] = {
        "benchmark": "weight_formats",
        "environment": describe(allow_modified=options.allow_modified),
        "settings": {
            "model": options.model.name,
            "loads": LOADS,
            **{name: getattr(options, name) for name in ("context", "windows", "length")},
        },
        "results": [],
    }
    try:
        source = read_source(options.model)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    chosen = [REFERENCE, *(name for name in options.formats if name != REFERENCE)]
    run = measured if options.tiny else in_child
    with tempfile.TemporaryDirectory() as folder:
        options.reference = Path(folder) / "reference.npy"
        for name in chosen:
            row: dict[str, Any] = {"format": name}
            row["rounded_to_nearest"] = FORMATS[name].write is not own_file and name != REFERENCE
            try:
                began = time.perf_counter()
                with model_file(source, name, Path(folder)) as path:
                    row["write_seconds"] = time.perf_counter() - began
                    row |= run(name, path, options)
            except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                if name == REFERENCE:
                    raise SystemExit(f"error: {name}: {error}") from None
                row["error"] = str(error)[-600:]
            report["results"].append(row)
            write_report(options.json, report)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    print(table(report["results"]))
    if any("error" in row for row in report["results"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
