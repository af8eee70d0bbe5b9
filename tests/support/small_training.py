"""Builds a training run that takes seconds: a tiny model, samples of random ids, few steps."""

import jax
import numpy as np
import pytest

from jsparse.policies.head_gates import load
from jsparse.runtime.compilation import keep_compilations
from jsparse.train.data import Source, TrainingSample
from jsparse.train.run_folder import read_log
from jsparse.train.settings import Settings
from jsparse.train.trainer import Trainer
from tests.support.tiny import VOCAB, tiny_params

STEPS, SEEDS = 6, 2
LAYERS, HEADS = 2, 4


def random_source(longest=24):
    def draw(step, size):
        rng = np.random.default_rng((7, step))
        for _ in range(size):
            length, answer = (
                rng.integers(8, longest, endpoint=True),
                rng.integers(1, 4, endpoint=True),
            )
            context, target = (
                rng.integers(VOCAB, size=n).astype(np.int32) for n in (length, answer)
            )
            yield TrainingSample(context, target, np.arange(answer) < 3)

    return Source(
        lambda step, size: [*draw(step, size)],
        4,
        (longest,),
        {"source": "random", "longest": longest},
    )


def model():
    return tiny_params(LAYERS, num_heads=2 * HEADS, num_kv_heads=HEADS)


def trainer(folder, *, resume=False, devices=1, longest=24, params=None, **changes):
    """Builds a trainer on the first `devices` devices."""
    keep_compilations()
    usual = {"target": 6, "steps": STEPS, "batch": 2, "seeds": SEEDS, "held_out": 2, "rate": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: jax.devices()[:devices])
        return Trainer(
            params or model(),
            random_source(longest),
            Settings(**usual | changes),
            folder,
            resume=resume,
        )


def timeless(told):
    """Returns a record, or a line of the log, without the values that differ from run to run."""
    return {name: value for name, value in told.items() if name not in ("seconds", "peak_bytes")}


def left(folder):
    """Returns the results of a run: the gates files' masks, scores and records, and the log."""
    files = sorted(folder.glob("gates_*.safetensors"))
    gates = [load(str(file)) for file in files]
    return {
        "files": [file.name for file in files],
        "retrieval": [each.retrieval.tolist() for each in gates],
        "scores": [np.asarray(each.scores).tolist() for each in gates],
        "records": [timeless(each.record) for each in gates],
        "log": [timeless(line) for line in read_log(folder)],
    }
