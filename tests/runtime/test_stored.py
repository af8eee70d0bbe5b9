"""Tests programs on disk: they are found again, and never after a change."""

import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsparse.builder import dense
from jsparse.machine import folders
from jsparse.models.checkpoint import spread
from jsparse.policies import expressions, head_gates
from jsparse.policies.combinators import keep
from jsparse.policies.expressions import parse
from jsparse.runtime import compilation, fingerprint, stored
from jsparse.runtime.compilation import Program
from jsparse.runtime.sampling import greedy as greedy_choice
from jsparse.runtime.sampling import sampled as sampled_choice
from jsparse.runtime.stored import ProgramStore
from tests.support.marks import slow_except
from tests.support.serving import bits, greedy, tiny_llm
from tests.support.tiny import random_prompts, tiny_params

EXPRESSIONS = [
    "dense()",
    "quest(budget=64)",
    "quest(budget=128)",
    "keep(lychee_decode(gates='smollm2', value=64))",
    "twilight(quest(budget=64), p=0.9)",
    "hard_kv(budget=512)",
    "lychee_cluster(budget=256)",
    "offloaded(lfps(budget=0.5))",
]
TELL = f"""
from jsparse.policies.combinators import keep
from jsparse.policies.expressions import parse
from jsparse.runtime import fingerprint
for expression in {EXPRESSIONS!r}:
    print(fingerprint.of(parse(expression)))
"""


class Watched(ProgramStore):
    """Counts the programs that it stored and found."""

    def __init__(self, folder):
        super().__init__(folder)
        self.puts, self.asked, self.found = Semaphore(0), 0, 0

    def put(self, key, made):
        super().put(key, made)
        self.puts.release()

    def get(self, key, arguments, devices):
        found = super().get(key, arguments, devices)
        self.asked += 1
        self.found += found is not None
        return found

    def settle(self, number):
        """Waits until `count` programs have been stored, which happens in the background."""
        for _ in range(number):
            assert self.puts.acquire(timeout=60)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Programs are stored in an empty folder, and jax's own cache is off."""
    made = Watched(tmp_path / "programs")
    monkeypatch.setattr(compilation, "_store", made)
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield made
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_fingerprints_are_equal_across_processes_and_distinguish_policies():
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not this process's
    told = subprocess.run(
        [sys.executable, "-c", TELL],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": seed, "PATH": "", "JAX_PLATFORMS": "cpu"},
    ).stdout.split()
    assert len(set(told)) == len(EXPRESSIONS)
    assert told == [fingerprint.of(parse(expression)) for expression in EXPRESSIONS]


def weigh(x, tree, *, times):
    """Returns more than arrays: a named tuple within a dict."""
    return {
        "sum": times * x.sum(),
        "call": compilation._Call(x, {}, (tree["a"],), {}, 0, True, True),
    }


def on_devices(*which):
    devices = np.array(jax.devices())[list(which)]
    return NamedSharding(Mesh(devices, ("ranks",)), PartitionSpec("ranks"))


def test_different_values_have_different_fingerprints():
    for one, other in (
        (1, 1.0),
        (0, False),
        ("1", b"1"),
        ((1, (2, 3)), ((1, 2), 3)),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (np.float32(1), np.float64(1)),
        (jnp.float32, jnp.bfloat16),
        (greedy_choice, sampled_choice),
    ):
        assert fingerprint.of(one) != fingerprint.of(other), (one, other)
        assert fingerprint.of(one) == fingerprint.of(one)


def test_foreign_code_has_no_fingerprint():
    for value in (
        lambda x: x,
        weigh,
        partial(weigh, times=1),
        dense()._replace(init=lambda spec: ()),
        keep(dense()._replace(init=lambda spec: ()), sink=4, recent=4),
        expressions.remember("own.py:mine", dense()),
        np.arange(2000),  # its repr leaves the middle out
    ):
        with pytest.raises(fingerprint.NoFingerprint):
            fingerprint.of(value)


def test_fingerprint_includes_the_files_that_a_policy_names(tmp_path):
    found = set()
    for mask in ([[1, 1], [1, 0]], [[1, 1], [0, 1]]):
        fingerprint._of_policy.cache_clear()
        head_gates.save(head_gates.HeadGates(np.array(mask, bool)), tmp_path / "gates")
        policy = parse(f"lychee_decode(gates={str(tmp_path / 'gates')!r}, value=64)")
        found.add(fingerprint.of(policy))
    assert len(found) == 2


def test_fingerprint_includes_every_source_file(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "package")
    found = {fingerprint.of_files(tmp_path)}
    for name in ("a.py", "package/b.py", "package/gates.safetensors"):
        (tmp_path / name).write_text("")
        found.add(fingerprint.of_files(tmp_path))
        (tmp_path / name).write_text("A = 1")
        found.add(fingerprint.of_files(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    found.add(fingerprint.of_files(tmp_path))
    assert len(found) == 8
    (tmp_path / "a.txt").write_text("")
    assert fingerprint.of_files(tmp_path) in found
    assert fingerprint.of_files(fingerprint.PACKAGE) == fingerprint.SOURCES


@pytest.fixture
def weighing(monkeypatch):
    """Makes the program as each process makes it; its function is known."""
    monkeypatch.setattr(fingerprint, "KNOWN", fingerprint.KNOWN | {__name__.partition(".")[0]})
    options = {"static_argnames": "times", "donate_argnames": "x"}
    return lambda mesh=None: Program(weigh, mesh=mesh, **options)


def run(program, x=(0.0, 1.0, 2.0), times=2):
    return program(jnp.array(x), {"a": jnp.ones(2)}, times=times)


def test_next_process_neither_traces_nor_compiles(store, weighing, monkeypatch):
    made = run(weighing())
    store.settle(1)
    again = weighing()
    monkeypatch.setattr(again, "lower", None)
    given = jnp.arange(3.0)
    found = again(given, {"a": jnp.ones(2)}, times=2)
    assert (store.asked, store.found) == (2, 1)
    assert jax.tree.structure(found) == jax.tree.structure(made)
    assert found["sum"] == made["sum"] == 6
    np.testing.assert_array_equal(found["call"].given, [0, 1, 2])
    assert given.is_deleted()  # donated
    assert run(again)["sum"] == 6
    assert store.asked == 2


def test_other_arguments_are_other_programs(store, weighing):
    changes = {}, {"times": 3}, {"x": (1.0, 2.0)}, {"x": (1, 2, 3)}
    for change in changes:
        run(weighing(), **change)
        store.settle(1)
    assert (store.asked, store.found) == (len(changes), 0)


def test_program_of_shapes_is_that_of_arrays(store, weighing):
    made = weighing()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (jnp.zeros(3), {"a": jnp.ones(2)})
    )
    ahead = made.ahead(*shapes, times=2).result()
    assert ahead(jnp.arange(3.0), {"a": jnp.ones(2)})["sum"] == 6
    assert run(made)["sum"] == 6
    assert store.asked == 1


def test_unreadable_file_is_replaced(store, weighing, caplog):
    run(weighing())
    store.settle(1)
    (file,) = store.folder.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:100], b"", stored.zlib.compress(b"other")):
        file.write_bytes(damaged)
        caplog.clear()
        assert run(weighing())["sum"] == 6
        store.settle(1)
        assert "cannot be read and is compiled again" in caplog.text
    assert store.found == 0
    run(weighing())
    assert store.found == 1


def test_changed_inputs_compile_again(store, weighing, monkeypatch):
    run(weighing())
    store.settle(1)
    monkeypatch.setattr(fingerprint, "SOURCES", "edited")
    run(weighing())
    assert store.found == 0


def test_settings_of_a_thread_are_respected(store, weighing):
    """They normally compile in other threads, but not then."""
    made = weighing()
    run(made)
    store.settle(1)
    with jax.enable_x64(True):
        assert run(made)["sum"].dtype == jnp.float64
    assert (store.asked, store.found) == (1, 0)
    assert run(made)["sum"].dtype == jnp.float32
    # a setting of all threads makes another program
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        run(made)
        assert (store.asked, store.found) == (2, 0)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    run(made)
    assert store.asked == 2


@pytest.mark.parametrize(
    ("where", "stored_there"),
    [(on_devices(0, 1), True), (on_devices(1, 0), False), (on_devices(2, 3), False)],
)
def test_programs_of_the_first_devices_are_stored(store, weighing, where, stored_there):
    """A stored program runs on the devices that it was compiled for, in any mesh."""
    for nth in range(2):
        given = jax.device_put(jnp.arange(4.0), where)
        given = given, {"a": jax.device_put(jnp.ones(2), where)}
        made = weighing(where.mesh)(*given, times=2)
        assert made["sum"] == 12
        assert made["call"].given.sharding.device_set == where.device_set
        if stored_there and not nth:
            store.settle(1)
    assert (store.asked, store.found) == ((2, 1) if stored_there else (0, 0))


def test_another_process_runs_a_program_that_it_receives(store, weighing, monkeypatch):
    shapes = jax.eval_shape(lambda: (jnp.zeros(3), {"a": jnp.ones(2)}))
    data = stored.packed(weighing().ahead(*shapes, times=2).result())
    there = weighing()
    monkeypatch.setattr(there, "lower", None)
    made = there.unpacked(data, *shapes, times=2)
    assert made(jnp.arange(3.0), {"a": jnp.ones(2)})["sum"] == 6


def test_programs_that_cannot_be_stored_run_anyway(store):
    made = Program(weigh, static_argnames="times")
    assert run(made)["sum"] == 6
    assert store.asked == 0
    assert not store.folder.exists()


def test_folders_writable_by_others_are_named(monkeypatch):
    monkeypatch.setattr(folders.os, "getuid", lambda: 1000)
    for uid, mode, reason in (
        (0, 0o755, None),
        (1000, 0o750, None),
        (1001, 0o700, "its owner is user 1001: must be this user or root"),
        (1000, 0o770, "its mode is 770: must be writable by its owner alone"),
        (0, 0o1777, "its mode is 777: must be writable by its owner alone"),
    ):
        status = SimpleNamespace(st_uid=uid, st_mode=stat.S_IFDIR | mode)
        assert folders.distrust(cast(Path, SimpleNamespace(stat=lambda s=status: s))) == reason


def test_programs_that_others_could_have_written_are_not_run(store, monkeypatch, caplog):
    read = []
    monkeypatch.setattr(stored, "unpacked", lambda data, *_: read.append(data))
    store.folder.mkdir(mode=0o700)
    (store.folder / "a").write_bytes(b"program")
    store.get("a", (), [])
    assert read == [b"program"]
    store.folder.chmod(0o777)
    for _ in range(2):
        assert store.get("a", (), []) is None
        store.put("b", SimpleNamespace(data=b"other"))
    assert read == [b"program"]
    assert [file.name for file in store.folder.iterdir()] == ["a"]
    (warning,) = caplog.messages
    assert f"programs in {store.folder} are not used: its mode is 777" in warning


def test_folder_of_programs_is_private_to_the_user(store):
    before = os.umask(0)
    try:
        store.put("a", SimpleNamespace(data=b"program"))
    finally:
        os.umask(before)
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_jaxs_own_cache_is_used_if_no_other_user_can_write_to_it(tmp_path, monkeypatch, mode):
    used = []
    monkeypatch.setattr(compilation, "_store", None)
    monkeypatch.setenv("JSPARSE_CACHE_DIR", str(tmp_path))
    config = SimpleNamespace(
        jax_compilation_cache_dir=None,
        jax_disable_jit=False,
        update=lambda *pair: used.append(pair),
    )
    monkeypatch.setattr(compilation, "jax", SimpleNamespace(config=config))
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax").chmod(mode)
    compilation.keep_compilations()
    folder = ("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert (folder in used) == (mode == 0o700)


def test_least_recently_used_programs_are_evicted(store, monkeypatch):
    store.folder.mkdir()
    for nth, name in enumerate("abcd"):
        (store.folder / name).write_bytes(bytes(100))
        stored.os.utime(store.folder / name, (nth, nth))
    monkeypatch.setattr(stored, "MAX_BYTES", 250)
    store._make_room()
    assert sorted(file.name for file in store.folder.iterdir()) == ["c", "d"]


@pytest.mark.parametrize("ranks", slow_except([1, 2], 1))
def test_engine_with_stored_programs_gives_the_same_bits(store, ranks):
    expression = "quest(budget=16)"
    prompts = random_prompts((9, 21), seed=5)
    params = tiny_params(num_layers=1)
    params = spread(params, ranks) if ranks > 1 else params
    first = tiny_llm(expression, params=params)
    expected = [bits(out) for out in first.generate(prompts, greedy(6))]
    store.settle(first.engine.programs.compiled)
    again = tiny_llm(expression, params=params)
    assert [bits(out) for out in again.generate(prompts, greedy(6))] == expected
    assert store.found == again.engine.programs.compiled
