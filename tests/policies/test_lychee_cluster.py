"""Tests LycheeCluster against its definition: clusters, units, radii, and selections."""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec
from jsparse.policies.clusters import engine, index, search
from jsparse.policies.clusters.chunking import Chunks
from jsparse.policies.expressions import parse
from jsparse.runtime.session import Session
from tests.support.chunk_layer import DIM, GROUP, HEADS, ROWS, Layer, chunks_of
from tests.support.marks import slow_except
from tests.support.tiny import engine_logits, random_prompts, random_tokens, spec_of, tiny_params

SMALL = "budget=28, sink=2, recent=3, period=4"
FORMS = (
    f"lychee_cluster({SMALL}, lengths=(2, 4))",
    f"lychee_cluster({SMALL}, lengths=(2, 4), rank='bound', levels=2)",
    f"lychee_cluster({SMALL}, lengths=(2, 4), cluster_size=3, normalise=False, levels=2)",
    f"lychee_cluster({SMALL}, lengths=(2, 4), cluster_size=1, pooling='max', rank='bound')",
    f"lychee_cluster({SMALL}, lengths=(1, 3), chunks='fixed')",
    f"cluster_kv({SMALL}, cluster_size=5)",
)


# The slow model: head by head, chunk by chunk, in float64.


def unit(x):
    return x / max(np.linalg.norm(x), 1e-300)


class Group(NamedTuple):
    """A centroid, the number of its points, and its radius."""

    centroid: np.ndarray
    size: int
    radius: float


class Model:
    """One head's index by the definition, without optimisation."""

    def __init__(self, keys, chunks, *, size, pooling="mean", normalise=True):
        self.keys, self.size = keys.astype(np.float64), size
        self.pooling, self.normalise = pooling, normalise
        points = [self.point(chunk) for chunk in chunks]
        clusters = -(-len(points) // size)
        self.fine, self.of_chunk = self.k_means(points, [size * i for i in range(clusters)])
        self.points, self.chunks = points, list(chunks)
        units = self.units(clusters)
        starts = [i * clusters // units for i in range(units)]
        centroids = [group.centroid for group in self.fine]
        radii = [group.radius for group in self.fine]
        self.coarse, self.of_cluster = self.k_means(centroids, starts, radii)

    @staticmethod
    def units(clusters):
        return min(int(np.ceil(np.sqrt(clusters))), 64)

    def point(self, chunk):
        """The representative of a chunk's keys."""
        keys = self.keys[chunk[0] : chunk[1]]
        pooled = keys.mean(0) if self.pooling == "mean" else keys.max(0)
        return unit(pooled) if self.normalise else pooled

    def nearest(self, point, centroids):
        return int(np.argmax([unit(centroid) @ unit(point) for centroid in centroids]))

    def k_means(self, points, starts, radii=None):
        centroids, of_point = [unit(points[i]) for i in starts], []
        for _ in range(10):
            of_point = [self.nearest(point, centroids) for point in points]
            for i in range(len(centroids)):
                members = [unit(p) for p, group in zip(points, of_point, strict=True) if group == i]
                if members:
                    centroids[i] = unit(np.mean(members, 0))
        groups = []
        for i, centroid in enumerate(centroids):
            members = [n for n, group in enumerate(of_point) if group == i]
            if members and not self.normalise:
                centroid = np.mean([points[n] for n in members], 0)
            own = [radii[n] if radii else 0.0 for n in members]
            far = [
                np.linalg.norm(points[n] - centroid) + r for n, r in zip(members, own, strict=True)
            ]
            groups.append(Group(centroid, len(members), max(far, default=0.0)))
        return groups, of_point

    def moved(self, group, points, radii=None):
        """The group after points joined it together."""
        total = group.size + len(points)
        centroid = (group.size * group.centroid + np.sum(points, 0)) / total
        centroid = unit(centroid) if self.normalise else centroid
        far = [
            np.linalg.norm(p - centroid) + r
            for p, r in zip(points, radii or [0.0] * len(points), strict=True)
        ]
        if group.size:
            far.append(group.radius + np.linalg.norm(centroid - group.centroid))
        return Group(centroid, total, max(far))

    def join(self, chunks):
        """Adds chunks that were cut at the same time."""
        had, groups = len(self.fine), []
        empty = Group(np.zeros(self.keys.shape[1]), 0, 0.0)
        for chunk in chunks:
            n = len(self.points)
            self.chunks.append(chunk)
            self.points.append(self.point(chunk))
            if n % self.size == 0:
                self.fine.append(empty)
            founds = n % self.size == 0 or not had
            known = [group.centroid for group in self.fine[:had]]
            groups.append(n // self.size if founds else self.nearest(self.points[-1], known))
            self.of_chunk.append(groups[-1])
        for i in set(groups):
            new = [self.points[-len(groups) + n] for n, group in enumerate(groups) if group == i]
            self.fine[i] = self.moved(self.fine[i], new)
        units, joined = len(self.coarse), {}
        for i in range(had, len(self.fine)):
            if self.units(i + 1) > len(self.coarse):
                chosen = len(self.coarse)
                self.coarse.append(empty)
            elif units:
                known = [group.centroid for group in self.coarse[:units]]
                chosen = self.nearest(self.fine[i].centroid, known)
            else:
                chosen = len(self.coarse) - 1
            self.of_cluster.append(chosen)
            joined.setdefault(chosen, []).append(i)
        for unit_, members in joined.items():
            centroids = [self.fine[i].centroid for i in members]
            radii = [self.fine[i].radius for i in members]
            self.coarse[unit_] = self.moved(self.coarse[unit_], centroids, radii)
        for i in set(groups):
            group = self.coarse[self.of_cluster[i]]
            away = np.linalg.norm(self.fine[i].centroid - group.centroid) + self.fine[i].radius
            far = max(group.radius, away)
            self.coarse[self.of_cluster[i]] = group._replace(radius=far)

    def scores(self, groups, q, bound):
        """The largest score of any query of the group for each group of points."""
        return [
            max(one @ g.centroid + (np.linalg.norm(one) * g.radius if bound else 0.0) for one in q)
            if g.size
            else -np.inf
            for g in groups
        ]

    def select(self, q, length, *, budget, sink, bound, levels):
        """The attended tokens."""
        end = self.chunks[-1][1] if self.chunks else sink
        chosen = {*range(sink), *range(end, length)}
        clusters = self.scores(self.fine, q, bound)
        allowed = set(range(len(self.fine)))
        if levels == 2:
            tokens = np.zeros(len(self.coarse))
            for chunk, cluster in zip(self.chunks, self.of_chunk, strict=True):
                tokens[self.of_cluster[cluster]] += chunk[1] - chunk[0]
            units = np.argsort([-s for s in self.scores(self.coarse, q, bound)], kind="stable")
            held = np.cumsum(tokens[units]) - tokens[units]
            kept = {
                u
                for n, u in enumerate(units)
                if n < search.MIN_UNITS or held[n] < engine.WIDER * budget
            }
            allowed = {i for i in allowed if self.of_cluster[i] in kept}
        ranked = sorted(
            (-clusters[cluster], n) for n, cluster in enumerate(self.of_chunk) if cluster in allowed
        )
        for _, n in ranked:
            first, behind = self.chunks[n]
            if len(chosen) + behind - first > budget:
                break
            chosen |= set(range(first, behind))
        return chosen


def options(expression):
    """The options of a policy's name that the slow model needs."""
    name = parse(expression).name
    return {
        "size": int(name.split("cluster_size=")[1].split(",")[0].rstrip(")")),
        "pooling": "max" if "pooling='max'" in name else "mean",
        "normalise": "normalise=True" in name,
    }, {"bound": "rank='bound'" in name, "levels": 2 if "levels=2" in name else 1}


@pytest.mark.parametrize("expression", slow_except(FORMS, FORMS[1], FORMS[-1]))
def test_index_and_selection_match_the_definition(expression):
    layer = Layer(expression, (45, 33), 72)
    form, ranked = options(expression)
    models = [
        [Model(layer.k[b, :, h], chunks_of(layer.state, b), **form) for h in range(HEADS)]
        for b in range(ROWS)
    ]
    left_out = 0
    while max(layer.lengths) < layer.k.shape[1]:
        chosen, q = layer.step()
        slots = layer.slots(chosen)
        q = q.reshape(ROWS, HEADS, GROUP, DIM)
        for b, h in np.ndindex(ROWS, HEADS):
            wanted = models[b][h].select(q[b, h], layer.lengths[b], budget=28, sink=2, **ranked)
            got = set(np.flatnonzero(slots[b, h]).tolist())
            assert got == wanted, (layer.lengths, b, h)
            assert len(got) <= 28
            left_out += layer.lengths[b] - len(got)
        if layer.maintain():
            for b, h in np.ndindex(ROWS, HEADS):
                models[b][h].join(chunks_of(layer.state, b)[len(models[b][h].chunks) :])
    assert left_out > 500
    made = jax.device_get(layer.state.layers[0])
    for b, h in np.ndindex(ROWS, HEADS):
        model = models[b][h]
        pairs = [(made.fine, model.fine, model.of_chunk)]
        if made.coarse is not None:
            pairs.append((made.coarse, model.coarse, model.of_cluster))
        for groups, wanted, of_point in pairs:
            count = len(wanted)
            np.testing.assert_array_equal(groups.size[b, h, :count], [g.size for g in wanted])
            assert not groups.size[b, h, count:].any()
            np.testing.assert_array_equal(groups.of_point[b, h, : len(of_point)], of_point)
            centroids = np.array([g.centroid for g in wanted])
            np.testing.assert_allclose(groups.centroid[b, h, :count], centroids, atol=2e-6)
            if groups.radius is not None:
                radii = [g.radius for g in wanted]
                np.testing.assert_allclose(groups.radius[b, h, :count], radii, atol=1e-4)


def require_bounds(layer):
    """The radii of every chunk's cluster and unit reach as far as the chunk."""
    made = jax.device_get(layer.state.layers[0])
    for b, h in np.ndindex(ROWS, HEADS):
        for n, (first, behind) in enumerate(chunks_of(layer.state, b)):
            v = unit(layer.k[b, first:behind, h].astype(np.float64).mean(0))
            groups = [(made.fine, made.fine.of_point[b, h, n])]
            if made.coarse is not None:
                groups.append((made.coarse, made.coarse.of_point[b, h, groups[0][1]]))
            for found, i in groups:
                away = np.linalg.norm(v - found.centroid[b, h, i].astype(np.float64))
                assert away <= found.radius[b, h, i]


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "dtype"), [(1, jnp.bfloat16), (2, jnp.float32)])
def test_radii_bound_every_chunk_after_many_updates(levels, dtype):
    tokens = 720
    expression = (
        f"lychee_cluster(budget=24, sink=1, recent=1, period=2, lengths=(1, 1), rank='bound', "
        f"cluster_size=6, levels={levels}, chunks='fixed')"
    )
    layer = Layer(expression, (300, 40), tokens, spread=20.0, dtype=dtype)
    while max(layer.lengths) < tokens:
        layer.step()
        layer.maintain()
    assert int(layer.state.chunks.count.sum()) > 1000 - 300
    assert layer.state.layers[0].fine.radius.max() > 0.5
    require_bounds(layer)


@pytest.mark.gpu
def test_repeated_runs_give_the_same_bits_whatever_the_other_rows():
    """Programs are compiled again, and the first row of the second run differs."""
    spec = CacheSpec(1, 2, 8, 2, 128, 16, 512, jnp.bfloat16)
    form, rng = index.Form(16, 2, radii=True, units=True), np.random.default_rng(0)
    starts = jnp.broadcast_to(16 + 13 * jnp.arange(601), (2, 601)).astype(jnp.int32)
    chunks, made = Chunks(starts, jnp.array([600, 450])), []
    keys = [rng.normal(size=(2, 512 * 2, 16, 128)).astype(np.float32) for _ in range(2)]
    for first in keys:
        jax.clear_caches()
        k = jnp.asarray(np.concatenate([first[0], keys[0][1]]), jnp.bfloat16)
        held = kv_cache.init(spec).layers[0]._replace(k=k, lengths=jnp.full((2, 2), 8192))
        made.append(jax.device_get(jax.jit(partial(index.build, form=form))(held, chunks)))
    for one, other in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_array_equal(one[1].view(np.uint8), other[1].view(np.uint8))
    assert (made[0].fine.centroid[0] != made[1].fine.centroid[0]).any()


@pytest.mark.slow
def test_short_prompt_founds_clusters_while_it_decodes():
    layer = Layer(FORMS[0], (1, 1), 72)
    assert not layer.state.chunks.count.any()
    for _ in range(70):
        layer.step()
        layer.maintain()
    count, sizes = layer.state.chunks.count, layer.state.layers[0].fine.size
    clusters = np.asarray((sizes > 0).sum(-1))
    np.testing.assert_array_equal(
        clusters, np.broadcast_to(-(-count[:, None] // 2), clusters.shape)
    )
    assert sizes.max() < 12


def test_chunks_are_fixed_without_a_tokenizer_with_a_warning(caplog):
    params, prompts = tiny_params(num_layers=1), random_prompts((70, 29))
    forced = random_tokens(2, 12)
    small = "budget=28, sink=2, recent=3, period=4, lengths=(2, 4)"
    states = []
    for policy in (f"lychee_cluster({small})", f"lychee_cluster({small}, chunks='fixed')"):
        session = Session(params, parse(policy), spec_of(params, 2))
        session.prefill(prompts)
        states.append(session.prefilled.state.chunks)
    made, fixed = states  # with room for exactly the largest possible number
    np.testing.assert_array_equal(made.count, fixed.count)
    max_length = fixed.starts.shape[1]
    np.testing.assert_array_equal(np.asarray(made.starts)[:, :max_length], fixed.starts)
    assert any("fixed" in record.message for record in caplog.records)
    with pytest.raises(ValueError, match="must have a tokenizer"):
        engine_logits(params, f"lychee_cluster({small}, chunks='structure')", prompts, forced)


def test_rows_have_room_for_chunks_of_ten_tokens_of_eight_to_sixteen():
    """For a single length, and for the shortest, the room is the largest possible number."""
    usual = engine.Settings(0, 8, 16, "boundary_classes", cast(Any, None), 0, 0, 1)
    assert [usual.chunks_of(slots) for slots in (1, 10, 11, 1000)] == [1, 1, 2, 100]
    assert usual._replace(classes=None).chunks_of(1000) == 63
    assert usual._replace(shortest=14).chunks_of(1000) == 72


def test_units_are_opened_until_they_hold_enough_tokens():
    """The best come first, the earlier of equal ones; the last may hold more than needed."""
    scores = np.array([5.0, 1, 9, 7, 3, 3, 8, 2, 6, 4, 3, 0], np.float32)
    held = np.arange(1, 13, dtype=np.int32)
    order = [2, 6, 3, 8, 0, 9, 4, 5, 10, 7, 1, 11]
    for tokens, units in ((0, 8), (45, 8), (46, 9), (56, 9), (57, 10), (99, 12)):
        chosen = search.best_units(*(jnp.asarray(x)[None, None] for x in (scores, held)), tokens)
        assert sorted(order[:units]) == np.flatnonzero(chosen[0, 0]).tolist(), tokens


def test_keys_of_any_magnitude_have_a_direction():
    x = jnp.asarray([[0.0, 0.0], [1e37, 1e37], [1e-37, 0.0], [-2.0, 0.0]])
    wanted = [[0, 0], [0.5**0.5] * 2, [1, 0], [-1, 0]]
    np.testing.assert_allclose(index.unit_length(x), wanted, rtol=1e-6)


def test_bad_arguments_are_named():
    for expression, message in (
        ("lychee_cluster(budget=100)", r"budget=100: must be at least 175"),
        ("cluster_kv(budget=144)", r"budget=144: must be at least 145"),
        ("lychee_cluster(levels=True)", r"levels=True: must be one of \[1, 2\]"),
        ("lychee_cluster(rank='radius')", r"rank='radius': must be one of \['centroid', 'bound'\]"),
        ("lychee_cluster(pooling='sum')", r"pooling='sum': must be one of \['mean', 'max'\]"),
        ("lychee_cluster(chunks='pages')", r"chunks='pages': must be one of \[None, 'structure'"),
        ("lychee_cluster(cluster_size=0)", r"cluster_size=0: must be an integer of at least 1"),
        ("lychee_cluster(normalise=1)", r"normalise=1: must be True or False"),
        ("lychee_cluster(lengths=8)", r"lengths=8: must be the minimum and maximum"),
        ("lychee_cluster(lengths=(8, 4))", r"lengths\[1\]=4: must be an integer of at least 8"),
        ("lychee_cluster(recent=8)", r"recent=8: must be an integer of at least 9"),
        ("lychee_cluster(sink=-1)", r"sink=-1: must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(expression)
