"""Trains head gates, and writes the record and each seed's gates to the run's folder.

The folder has `settings.json`, `log.jsonl` (one line per step, and periodically all gates),
`checkpoints/` and, after the run, one file of gates per seed (see jsparse.policies.head_gates) and
`record.json`. An interrupted run resumes from its last checkpoint, with the same samples and the
same noise.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import jsparse
from jsparse.models.checkpoint import Params, require_full_attention, require_on_one_device
from jsparse.policies.head_gates import HeadGates, save
from jsparse.train import distill, lagrangian
from jsparse.train.data import Source, check_at_least
from jsparse.train.families import hardened
from jsparse.train.lagrangian import LagrangianState
from jsparse.train.run_folder import Log, check_folder, read_log
from jsparse.train.settings import Settings

GREY = 0.1, 0.9
KEPT = 50  # lines of the log with all gates, evenly spaced over the training
OnStep = Callable[[int, int, dict[str, Any]], Any]


class Trainer:
    """One training run, in a folder."""

    def __init__(
        self,
        params: Params,
        source: Source,
        settings: Settings,
        folder: Path,
        *,
        resume: bool = False,
    ):
        """Starts a training, or with `resume` continues one.

        Raises:
            ValueError: a setting is out of range, the folder does not match `resume` and the
                settings, or the model is spread over several devices, has sliding windows, or has
                matrices in blocks.
        """
        require_on_one_device(params)
        require_full_attention(params)
        if params.forms:
            raise ValueError(f"params={params!r}: must be loaded with weights='plain' to train")
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
        description = {
            "settings": asdict(settings) | penalty,
            "data": source.describe(),
            "model": params.name,
            "dtype": str(np.dtype(params.dtype)),
        }
        self._description = json.loads(json.dumps(description))
        check_folder(self.folder, self._description, resume=resume)
        self._seeds = jax.vmap(jax.random.key)(jnp.arange(settings.seeds))
        self._teacher_cache = jax.jit(self._read)
        self._step = jax.jit(self._stepped, donate_argnums=1)
        self._distances = jax.jit(self._measured)

    def _read(self, weights: Any, batch: Any) -> distill.TeacherCache:
        rows, everywhere = PartitionSpec("data"), PartitionSpec()
        teach = partial(distill.teacher_cache, self._decoder, match=self.settings.match)
        shared = jax.shard_map(
            teach, mesh=self._mesh, in_specs=(everywhere, rows), out_specs=rows, check_vma=False
        )
        return shared(weights, batch)

    def _stepped(
        self, weights: Any, state: LagrangianState, nth: Array, lesson: distill.TeacherCache
    ) -> tuple[LagrangianState, lagrangian.StepReport]:
        keys = jax.vmap(jax.random.fold_in, (0, None))(self._seeds, nth)
        return lagrangian.step(
            self.problem,
            state,
            keys,
            partial(self._distance, weights, lesson, self.settings.sets),
            nth,
        )

    def _measured(self, weights: Any, gates: Array, lesson: distill.TeacherCache) -> Array:
        """Returns the distances of several gates [n, L, K], with the sets of decoding."""
        sets = "streaming" if self.settings.sets == "streaming" else "handed_on"
        return jax.lax.map(partial(self._distance, weights, lesson, sets), gates)

    def _distance(
        self, weights: Any, lesson: distill.TeacherCache, sets: distill.Sets, gates: Array
    ) -> Array:
        ways: Any = {"keep": self.settings.keep, "match": self.settings.match, "sets": sets}
        return distill.distance(
            distill.predictions(self._decoder, weights, lesson, gates, **ways), lesson
        )

    def teach(self, nth: int) -> distill.TeacherCache:
        """Prefills the nth batch with the dense model."""
        batch = self.source.batch(nth, self.settings.batch)
        return self._teacher_cache(
            self._weights, jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec("data")))
        )

    def run(self, report: OnStep = lambda *_: None, *, save_every: int = 200) -> dict[str, Any]:
        """Trains to the end and returns the record that it writes.

        `report` receives each step's number, the number of steps, and its line of the log.
        Checkpoints are `save_every` steps apart.
        """
        from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions
        from orbax.checkpoint.args import StandardRestore, StandardSave

        check_at_least(1, save_every=save_every)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(
            json.dumps(self._description, indent=2) + "\n", encoding="utf-8"
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
                    ahead = self.teach(nth + 1)  # while the device is busy
                    line = {
                        "step": nth + 1,
                        **{name: np.asarray(x).tolist() for name, x in progress._asdict().items()},
                    }
                    line["seconds"] = round(-began + (began := time.perf_counter()), 4)
                    log.write(line)
                    if (nth + 1) * KEPT // steps > nth * KEPT // steps:
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
        """Measures the trained gates, and writes them and the record."""
        gates, target = self.problem.gates, self.problem.target
        scores = np.asarray(lagrangian.with_first_layer(jax.vmap(gates.score)(state.gates)))
        soft = lagrangian.with_first_layer(jax.vmap(gates.mean)(state.gates))
        hard = jnp.stack([hardened(jnp.asarray(row), target) for row in scores])
        nothing = jnp.zeros_like(soft[:1]).at[:, 0].set(1.0)
        candidates = jnp.concatenate([soft, hard.astype(jnp.float32), nothing])
        far = np.mean(
            [
                np.asarray(self._distances(self._weights, candidates, lesson))
                for lesson in self._held_out()
            ],
            0,
        )
        seeds = self.settings.seeds
        learned = np.asarray(soft[:, 1:])
        record = self._description | {
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
        """Returns the peak bytes in use on a device; None if the device does not report it."""
        memory = [device.memory_stats() or {} for device in self._mesh.devices.flat]
        return max(
            (stats["peak_bytes_in_use"] for stats in memory if "peak_bytes_in_use" in stats),
            default=None,
        )
