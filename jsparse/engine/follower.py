"""Runs an engine's programs in several processes; process 0 plans.

A model may be spread over devices of several processes. All of them create the same engine. Process
0 takes requests, plans, and sends the others each program that it runs, with its host arrays. They
run the programs in that order. Nothing is copied off a device for this.

Only process 0 compiles programs, and sends them to the others. If each process compiled its own,
autotuning could pick different kernels, and rounding would differ: ranks would draw different
tokens.
"""

import hashlib
import json
import platform
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn, cast

import jax
import numpy as np

from jsparse.engine.programs import Programs
from jsparse.engine.setup import EngineSpec
from jsparse.engine.slots import Slots
from jsparse.machine.processes import Link
from jsparse.models.checkpoint import Params
from jsparse.runtime import fingerprint
from jsparse.runtime.compilation import Sendable
from jsparse.runtime.program_set import ProgramKey


class LeaderPrograms(Programs):
    """The programs of process 0, which sends the others each program that it runs."""

    def __init__(self, spec: EngineSpec, params: Params, link: Link, *, check_ranks: bool) -> None:
        """Creates the programs; with `check_ranks`, all ranks must choose the same tokens."""
        super().__init__(spec, params)
        self._link, self._check = link, check_ranks
        self._sent, self._sending = set[ProgramKey](), threading.Lock()

    def run(self, wanted: ProgramKey, *arrays: Any) -> Any:
        """Runs a program in all processes.

        Raises:
            RuntimeError: with `check_ranks`, ranks have chosen different tokens.
        """
        self.expect([wanted])
        self._made[wanted].result()  # a failed compilation raises here, before followers run it
        self._send(wanted)
        inputs = jax.tree.map(np.asarray, arrays[1:])
        self._link.send({"run": _as_json(wanted)}, jax.tree.leaves(inputs))
        out = super().run(wanted, *arrays[:1], *inputs)
        if self._check and _chooses(wanted):
            found = [_digests(out[1]), *(peer.receive()[0]["chose"] for peer in self._link.peers)]
            if len({digest for of_process in found for digest in of_process}) > 1:
                raise RuntimeError(
                    f"ranks have chosen different tokens; digests by process and rank: {found}"
                )
        return out

    def expect(self, wanted: Iterable[ProgramKey]) -> None:
        """Starts to compile programs; other processes get them as soon as they are ready."""
        new = [each for each in wanted if each not in self._made]
        super().expect(new)
        for each in new:
            self._made[each].add_done_callback(partial(self._send_if_compiled, each))

    def _send_if_compiled(self, key: ProgramKey, job: Future[Any]) -> None:
        if not job.cancelled() and job.exception() is None:
            self._send(key)

    def _send(self, key: ProgramKey) -> None:
        """Sends a compiled program to the other processes, if any, once."""
        if key in self._sent or not self._link.peers:
            return
        with self._sending:
            if key not in self._sent:
                program = cast(Sendable, self._made[key].result())
                data = np.frombuffer(program.data, np.uint8)
                self._link.send({"program": _as_json(key)}, [data])
                self._sent.add(key)


def follow_and_exit(spec: EngineSpec, params: Params, link: Link, *, check_ranks: bool) -> NoReturn:
    """Runs the leader's commands until it exits, then ends this process."""
    if threading.current_thread() is threading.main_thread():
        # on a signal to all processes, the leader drains its requests, then ends the followers
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
    programs, slots = Programs(spec, params), tuple[Slots, ...]()
    try:
        for message, arrays in link.messages():
            if "program" in message:
                programs.adopt(_key(message["program"]), arrays[0].tobytes())
                continue
            key = _key(message["run"])
            structure = jax.tree.structure(
                programs.placeholders(key.name, key.size) if slots else ()
            )
            out = programs.run(key, *slots, *jax.tree.unflatten(structure, arrays))
            slots = (out if isinstance(out, Slots) else out[0],)
            if check_ranks and _chooses(key):
                link.send({"chose": _digests(out[1])})
        jax.block_until_ready(slots)
        raise SystemExit(0)
    except Exception as error:
        link.send({"failed": repr(error)})
        raise


def agree(spec: EngineSpec, params: Params, link: Link, *, check_ranks: bool) -> None:
    """Checks that all processes are about to run the same engine.

    Raises:
        ValueError: they differ, by their arguments or by the code or model that they have loaded.
    """
    from jsparse import __version__

    model, sizes, flags = params.config, spec.sizes._asdict(), jax.config
    options = {"per_request": spec.knobs, "layer_stats": spec.layer_stats}
    packages = {"jsparse": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")}
    properties = {
        "versions": packages | {"Python": platform.python_version()},
        "sources": fingerprint.SOURCES,
        "kinds of devices": jax.local_devices()[0].device_kind,
        "check_ranks": check_ranks,
        "jax settings": f"{flags.jax_default_matmul_precision}, x64 {flags.jax_enable_x64}",
        "model": f"{model}, {params.types}",
        "weights": _of_norms(params.weights),
        "policy": spec.policy.name,
        "sizes": json.dumps(sizes | options),
    }
    first, *others = link.all_gather("engine", properties)
    for nth, other in enumerate(others, 1):
        for name, value in other.items():
            if value != first[name]:
                raise ValueError(
                    f"processes 0 and {nth} have different {name}: {first[name]} and {value}; all "
                    "must be started with the same arguments"
                )


def _of_norms(weights: Any) -> str:
    """Returns a digest of the arrays that all ranks have: a model's norms, and little else."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(weights):
        if "norm" in jax.tree_util.keystr(path):
            digest.update(np.asarray(leaf.addressable_shards[0].data).tobytes())
    return digest.hexdigest()


def _digests(packed: jax.Array) -> list[str]:
    """Returns a digest of the tokens that each rank of this process has chosen."""
    shards = (np.asarray(shard.data).tobytes() for shard in packed.addressable_shards)
    return [hashlib.sha256(each).hexdigest()[:16] for each in shards]


def _chooses(key: ProgramKey) -> bool:
    """Returns whether a program chooses tokens, which it returns after the slots."""
    return "choice" in dict(key.static)


def _as_json(key: ProgramKey) -> Any:
    return [key.name, key.size, sorted(key.static)]


def _key(value: Any) -> ProgramKey:
    name, size, static = value
    return ProgramKey(name, tuple(size), frozenset(map(tuple, static)))
