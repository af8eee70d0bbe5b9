"""Trains head gates: the settings, the loop, and the files it leaves on disk.

The folder of a run holds `settings.json`, `log.jsonl` (one line per step, and every so often all
gates), `checkpoints/` and, when it is done, one file of gates per seed (see
jsparse.policies.head_gates) and `record.json`. A run that was cut off goes on where its last
checkpoint is, with the same samples and the same noise.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import jsparse
from jsparse.models.checkpoint import Params
from jsparse.policies.head_gates import HeadGates, save
from jsparse.train import distill, lagrangian
from jsparse.train.data import Source, check_at_least
from jsparse.train.families import FAMILIES, hardened
from jsparse.train.lagrangian import Lagrangian, LagrangianState

GREY = 0.1, 0.9
# rate, start, damping
PENALTIES = {
    "ascent": (0.5, 0.0, 1000.0),
    "exponential": (1e-3, 2.0, 0.0),
    "fixed": (0.0, 0.05, 0.0),
}
OnStep = Callable[[int, int, dict[str, Any]], Any]


@dataclass(frozen=True)
class Settings:
    """Holds what a training depends on, besides the model and its data.

    Attributes:
        target: the number of retrieval heads wanted, layer 0's counted.
        family: "hard_kuma", "hard_concrete" or "direct".
        penalty: "ascent", "exponential" or "fixed"; see `lagrangian.Lagrangian`.
        penalty_rate, penalty_start, damping: settings of the penalty; None means what suits it.
        steps, batch: the number of steps, and of samples in each.
        anneal: the share of the steps over which the wanted number falls to the target.
        rate: AdamW learning rate.
        keep: the share of the context that a sparse head inherits.
        sets: "handed_on" or "refreshed"; see `distill`.
        match: what is compared, "logits" or "hidden".
        seeds: the number of seeds trained side by side, on the same samples with noise of their
            own.
        held_out: the number of batches, after those that are trained on, that measure the result.
    """

    target: int
    family: str = "hard_kuma"
    penalty: lagrangian.Penalty = "ascent"
    penalty_rate: float | None = None
    penalty_start: float | None = None
    damping: float | None = None
    anneal: float = 0.5
    steps: int = 3000
    batch: int = 1
    rate: float = 0.01
    keep: float = 0.3
    sets: distill.Sets = "handed_on"
    match: distill.Match = "logits"
    seeds: int = 1
    held_out: int = 16

    def lagrangian(self, layers: int, heads: int) -> Lagrangian:
        """Returns the rules for a model of these numbers of layers and KV heads.

        Raises:
            ValueError: a setting is out of its range.
        """
        kinds = {"penalty": lagrangian.Penalty, "match": distill.Match, "sets": distill.Sets}
        for name, known in {
            "family": tuple(FAMILIES),
            **{name: get_args(kind) for name, kind in kinds.items()},
        }.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}"
                )
        check_at_least(
            1, steps=self.steps, batch=self.batch, seeds=self.seeds, held_out=self.held_out
        )
        if not heads <= self.target <= layers * heads:
            raise ValueError(
                f"target={self.target}: must be from {heads}, layer 0's KV heads, to "
                f"{layers * heads}, all of them"
            )
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep}: must be above 0 and at most 1")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate={self.rate}: must be a finite number above 0")
        if not 0 <= self.anneal <= 1:
            raise ValueError(f"anneal={self.anneal}: must be from 0 to 1")
        if self.penalty == "fixed" and self.penalty_rate is not None:
            raise ValueError(
                f"penalty_rate={self.penalty_rate}: must not be given where penalty='fixed'"
            )
        usual: dict[str, float] = dict(
            zip(("penalty_rate", "penalty_start", "damping"), PENALTIES[self.penalty], strict=True)
        )
        chosen = {name: getattr(self, name) for name in usual}
        penalty = {name: usual[name] if value is None else value for name, value in chosen.items()}
        for name, value in penalty.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be finite and at least 0")
        family = FAMILIES[self.family]
        return Lagrangian(
            family,
            (layers, heads),
            self.target,
            self.steps,
            self.rate,
            self.penalty,
            anneal=self.anneal,
            **penalty,
        )


class Trainer:
    """Runs one training, in a folder."""

    def __init__(
        self,
        params: Params,
        source: Source,
        settings: Settings,
        folder: Path,
        *,
        resume: bool = False,
    ):
        """Begins a training, or with `resume` goes on with one.

        Raises:
            ValueError: a setting is out of its range; the folder holds a run, and `resume` is
                False; or it is True, and the folder holds none, or one of other settings.
        """
        config = params.config
        self.problem = settings.lagrangian(config.num_layers, config.num_kv_heads)
        devices = jax.local_devices()
        devices = np.array(devices[: math.gcd(settings.batch, len(devices))])  # equal shares
        self.settings, self.source, self.folder = settings, source, folder.absolute()
        self._mesh = Mesh(devices, ("data",))
        self._decoder = params.decoder
        self._weights = jax.device_put(params.weights, NamedSharding(self._mesh, PartitionSpec()))
        penalty = {
            name: getattr(self.problem, name)
            for name in ("penalty_rate", "penalty_start", "damping")
        }
        told = {
            "settings": asdict(settings) | penalty,
            "data": source.describe(),
            "model": params.name,
        }
        self._check_folder(told | {"dtype": str(np.dtype(params.dtype))}, resume)
        self._seeds = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
        self._teacher_cache = jax.jit(self._read)
        self._step = jax.jit(self._stepped, donate_argnums=1)
        self._distances = jax.jit(self._measured)

    def _check_folder(self, told: dict[str, Any], resume: bool) -> None:
        """Checks that the folder holds no training, or with `resume` one of the same settings."""
        path = self.folder / "settings.json"
        self._told = json.loads(json.dumps(told))
        shown = f"out={str(self.folder)!r}"
        if path.exists() != resume:
            what = (
                "no training to resume"
                if resume
                else "a training already; resume it or name another folder"
            )
            raise ValueError(f"{shown}: holds {what}")
        if resume:
            there, here = (
                _leaves(x) for x in (json.loads(path.read_text(encoding="utf-8")), self._told)
            )
            differing = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
            if differing:
                each = (
                    f"{name} {there.get(name)} there, {here.get(name)} here" for name in differing
                )
                raise ValueError(
                    f"{shown}: holds a training with other settings: {'; '.join(each)}"
                )

    def _read(self, weights: Any, batch: Any) -> distill.TeacherCache:
        rows, everywhere = PartitionSpec("data"), PartitionSpec()
        teach = partial(distill.teacher_cache, self._decoder, match=self.settings.match)
        shared = jax.shard_map(
            teach, mesh=self._mesh, in_specs=(everywhere, rows), out_specs=rows, check_vma=False
        )
        return shared(weights, batch)

    def _stepped(
        self, weights: Any, state: LagrangianState, nth: Array, given: distill.TeacherCache
    ) -> tuple[LagrangianState, lagrangian.StepReport]:
        keys = jax.vmap(jax.random.fold_in, (0, None))(self._seeds, nth)
        return lagrangian.step(
            self.problem,
            state,
            keys,
            partial(self._distance, weights, given, self.settings.sets),
            nth,
        )

    def _measured(self, weights: Any, gates: Array, given: distill.TeacherCache) -> Array:
        """Returns the distances of several gates [n, L, K], with sets handed on as in decoding."""
        return jax.lax.map(partial(self._distance, weights, given, "handed_on"), gates)

    def _distance(
        self, weights: Any, given: distill.TeacherCache, sets: distill.Sets, gates: Array
    ) -> Array:
        ways: Any = {"keep": self.settings.keep, "match": self.settings.match, "sets": sets}
        return distill.distance(
            distill.predictions(self._decoder, weights, given, gates, **ways), given
        )

    def teach(self, nth: int) -> distill.TeacherCache:
        """Reads the nth batch with the dense model."""
        batch = self.source.batch(nth, self.settings.batch)
        return self._teacher_cache(
            self._weights, jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec("data")))
        )

    def run(
        self, report: OnStep = lambda *_: None, *, save_every: int = 200, kept: int = 50
    ) -> dict[str, Any]:
        """Trains to the end and returns the record that it writes.

        Args:
            report: a callback after each step, with its number, the number of steps, and what the
                log says of it.
            save_every: the number of steps between checkpoints.
            kept: the number of times that all gates are logged, evenly over the training.
        """
        from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions
        from orbax.checkpoint.args import StandardRestore, StandardSave

        check_at_least(1, save_every=save_every, kept=kept)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(
            json.dumps(self._told, indent=2) + "\n", encoding="utf-8"
        )
        steps = self.settings.steps
        state = lagrangian.start(self.problem, self.settings.seeds)
        options = CheckpointManagerOptions(max_to_keep=1)
        with CheckpointManager(self.folder / "checkpoints", options=options) as checkpoints:
            first = checkpoints.latest_step() or 0
            if first:
                state = checkpoints.restore(first, args=StandardRestore(state))
            state = jax.device_put(state, NamedSharding(self._mesh, PartitionSpec()))
            with Log(self.folder / "log.jsonl", first) as log:
                if first == 0:
                    log.write(self._gates(0, state))
                began = time.perf_counter()
                ahead = self.teach(first)
                for nth in range(first, steps):
                    state, progress = self._step(self._weights, state, jnp.int32(nth), ahead)
                    ahead = self.teach(nth + 1)  # while the device is at work
                    line = {
                        "step": nth + 1,
                        **{name: np.asarray(x).tolist() for name, x in progress._asdict().items()},
                    }
                    line["seconds"] = round(-began + (began := time.perf_counter()), 4)
                    log.write(line)
                    if (nth + 1) * kept // steps > nth * kept // steps:
                        log.write(self._gates(nth + 1, state))
                    if (nth + 1) % save_every == 0 or nth + 1 == steps:
                        checkpoints.save(nth + 1, args=StandardSave(state))
                        checkpoints.wait_until_finished()
                    report(nth + 1, steps, line)
        return self._finish(state)

    def _gates(self, step: int, state: LagrangianState) -> dict[str, Any]:
        """Returns a line of the log with every gate, by seed: its mean and its parameters."""
        means = lagrangian.with_first_layer(jax.vmap(self.problem.gates.mean)(state.gates))
        leaves = {
            jax.tree_util.keystr(path).lstrip("."): x
            for path, x in jax.tree.leaves_with_path(state.gates)
        }
        return {
            "step": step,
            "mean": np.asarray(means).round(6).tolist(),
            "parameters": {name or "value": np.asarray(x).tolist() for name, x in leaves.items()},
        }

    def _finish(self, state: LagrangianState) -> dict[str, Any]:
        """Measures what came out, and writes the gates and the record."""
        gates, target = self.problem.gates, self.problem.target
        scores = np.asarray(lagrangian.with_first_layer(jax.vmap(gates.score)(state.gates)))
        soft = lagrangian.with_first_layer(jax.vmap(gates.mean)(state.gates))
        hard = jnp.stack([hardened(jnp.asarray(row), target) for row in scores])
        nothing = jnp.zeros_like(soft[:1]).at[:, 0].set(1.0)
        candidates = jnp.concatenate([soft, hard.astype(jnp.float32), nothing])
        far = np.mean(
            [
                np.asarray(self._distances(self._weights, candidates, given))
                for given in self._held_out()
            ],
            0,
        )
        seeds = self.settings.seeds
        learned = np.asarray(soft[:, 1:])
        record = self._told | {
            "seconds": sum(line["seconds"] for line in read_log(self.folder) if "seconds" in line),
            "device": self._mesh.devices.flat[0].device_kind,
            "versions": {"jax": jax.__version__, "jsparse": jsparse.__version__},
            "peak_bytes": self._peak_bytes(),
            "distance_of_layer_0_alone": float(far[-1]),
            "seeds": [
                {
                    "active": float(
                        lagrangian.expected(
                            self.problem, jax.tree.map(lambda x, i=i: x[i], state.gates)
                        )
                    ),
                    "multiplier": float(state.multiplier[i]),
                    "above_half": int((scores[i] > 0.5).sum()),
                    "retrieval_heads": int(hard[i].sum()),
                    "grey": float(((learned[i] > GREY[0]) & (learned[i] < GREY[1])).mean()),
                    "distance_of_mean_gates": float(far[i]),
                    "distance_of_hard_gates": float(far[seeds + i]),
                }
                for i in range(seeds)
            ],
        }
        (self.folder / "record.json").write_text(
            json.dumps(record, indent=2) + "\n", encoding="utf-8"
        )
        for i in range(seeds):
            own = {**record, "seeds": None, "seed": i, **record["seeds"][i]}
            save(
                HeadGates(np.asarray(hard[i]), scores[i], own),
                self.folder / f"gates_{i}.safetensors",
            )
        return record

    def _held_out(self) -> Iterator[distill.TeacherCache]:
        return (self.teach(self.settings.steps + i) for i in range(self.settings.held_out))

    def _peak_bytes(self) -> int | None:
        """Returns the most bytes in use on a device; None where it does not tell."""
        told = [device.memory_stats() or {} for device in self._mesh.devices.flat]
        return max(
            (stats["peak_bytes_in_use"] for stats in told if "peak_bytes_in_use" in stats),
            default=None,
        )


class Log:
    """Writes a file of JSON lines.

    Lines after step `first`, of a run that was cut off, are dropped.
    """

    def __init__(self, path: Path, first: int):
        lines = read_lines(path) if path.exists() and first else []
        aside = path.with_suffix(".new")
        aside.write_text(
            "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= first),
            encoding="utf-8",
        )
        aside.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line, on disk at once."""
        self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Returns all lines of a run's log."""
    return read_lines(folder / "log.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file.

    One that was cut off while it was written is none.
    """
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _leaves(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of nested dicts by their paths."""
    paths = jax.tree.leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in paths}
