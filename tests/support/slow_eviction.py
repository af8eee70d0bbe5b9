"""A slow and simple second implementation of the evicting policies: numpy in float64, one slot at a
time.

It shares no code with jsparse.policies.eviction. A method consists of a function that scores the
slots of a head, one that returns the number of slots each head of a layer keeps, and the protected
sizes.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.support.slow_model import SlowRow, attend, logits_of, logsumexp, softmax


@dataclasses.dataclass
class SlowHead:
    """A head's slots, beside their K and V in the SlowRow, as lists by slot.

    Attributes:
        positions: text positions.
        bias: terms added to the logits.
        numbers: the method's tracked numbers.
        missed: the number of compressions that left out a waiting slot.
        temperature: that of "calibrated"; None: not found yet.
    """

    positions: list
    bias: list
    numbers: list
    missed: list
    temperature: float | None = None


@dataclasses.dataclass
class Seen:
    """The inputs of a score: a head's keys and biases, the newest queries of its group, and the
    competing slots.
    """

    keys: list
    head: SlowHead
    window: list
    competing: list


@dataclasses.dataclass
class SlowMethod:
    """The sizes and functions of one method.

    Attributes:
        score: Seen -> a score for each of `seen.competing`.
        counts: (scores of each head, Seen of each) -> the number of slots that each head keeps.
        begin: Seen of the whole prompt -> a number for each slot.
        track: (numbers, shares, position) -> numbers.
    """

    score: Callable
    counts: Callable
    window: int
    sink: int = 0
    recent: int | None = None
    period: int = 0
    merge: bool = False
    patience: int = 0
    begin: Callable = lambda seen: [0.0] * len(seen.keys)
    track: Callable = lambda numbers, shares, position: numbers


class SlowEvictor:
    """Decodes a row by a method, and keeps the result of each compression."""

    def __init__(self, row: SlowRow, method: SlowMethod):
        self.row, self.method, self.steps = row, method, 0
        self.num_layers, self.num_heads = len(row.k), len(row.k[0])
        count = len(row.tokens)
        self.heads = [
            [
                SlowHead(list(range(count)), [0.0] * count, [0.0] * count, [0] * count)
                for _ in range(self.num_heads)
            ]
            for _ in range(self.num_layers)
        ]
        for layer in range(self.num_layers):
            for head in range(self.num_heads):
                seen = self.seen(layer, head)
                self.heads[layer][head].numbers = list(method.begin(seen))
        self.left = []
        self.compress()

    def step(self, token):
        """Returns the logits after one token."""
        logits = self.row.push(token, self.layer)
        self.steps += 1
        if self.method.period and self.steps % self.method.period == 0:
            self.compress()
        return logits

    def layer(self, layer, q):
        row, out = self.row, []
        for head in range(self.num_heads):
            known = self.heads[layer][head]
            for name, value in (
                ("positions", len(row.tokens) - 1),
                ("bias", 0.0),
                ("numbers", 0.0),
                ("missed", 0),
            ):
                getattr(known, name).append(value)
            read = [slot for slot, missed in enumerate(known.missed) if not missed]
            keys, values, bias = (
                [x[slot] for slot in read]
                for x in (row.k[layer][head], row.v[layer][head], known.bias)
            )
            group = q[head * row.group : (head + 1) * row.group]
            out += [attend(query, keys, values, bias) for query in group]
            shares = np.zeros(len(known.bias))
            shares[read] = softmax(np.add(logits_of(np.mean(group, axis=0), keys), bias))
            known.numbers = list(
                self.method.track(np.array(known.numbers), shares, len(row.tokens) - 1)
            )
        return out

    def seen(self, layer, head):
        method, row, known = self.method, self.row, self.heads[layer][head]
        recent = method.window if method.recent is None else method.recent
        group = slice(head * row.group, (head + 1) * row.group)
        window = [q[group] for q in row.q[layer][-method.window :]]
        competing = range(method.sink + method.merge, len(known.bias) - recent)
        return Seen(row.k[layer][head], known, window, list(competing))

    def compress(self):
        for layer in range(self.num_layers):
            seen = [self.seen(layer, head) for head in range(self.num_heads)]
            scores = [np.asarray(self.method.score(x)) for x in seen]
            for head, count in enumerate(self.method.counts(scores, seen)):
                self.keep(layer, head, seen[head], scores[head], count)
        self.left.append(
            [[list(head.positions) for head in heads] for heads in self.heads],
        )

    def keep(self, layer, head, seen, scores, count):
        method, row, known = self.method, self.row, self.heads[layer][head]
        order = [seen.competing[i] for i in np.argsort(-scores, kind="stable")]
        lost = order[count:]
        waiting = [s for s in lost if known.missed[s] < method.patience][: method.period]
        missed = [m + 1 if s in waiting else 0 for s, m in enumerate(known.missed)]
        gone = set(lost) - set(waiting)
        if method.merge and gone:
            merged = [method.sink, *sorted(gone)]
            queries = np.concatenate(seen.window)
            k, v, bias = merge(
                np.mean(queries, axis=0),
                *([x[s] for s in merged] for x in (seen.keys, row.v[layer][head], known.bias)),
            )
            row.k[layer][head][method.sink] = k
            row.v[layer][head][method.sink] = v
            known.bias[method.sink] = bias
        kept = [slot for slot in range(len(known.bias)) if slot not in gone]
        for held in (row.k, row.v):
            held[layer][head] = [held[layer][head][slot] for slot in kept]
        known.missed = missed
        for name in ("positions", "bias", "numbers", "missed"):
            setattr(known, name, [getattr(known, name)[slot] for slot in kept])


def merge(query, keys, values, bias):
    """Returns the key, value and bias that replace rows, at a query."""
    logits = np.add(logits_of(query, keys), bias)
    weights = softmax(logits)
    key = weights @ np.asarray(keys)
    return key, weights @ np.asarray(values), logsumexp(logits) - logits_of(query, [key])[0]


def attention(seen: Seen, slots=None):
    """The mean over window and group of softmaxes over the competing slots."""
    slots = seen.competing if slots is None else slots
    if not slots:
        return np.zeros(0)
    keys, bias = ([x[s] for s in slots] for x in (seen.keys, seen.head.bias))
    return np.mean(
        [softmax(np.add(logits_of(q, keys), bias)) for group in seen.window for q in group], axis=0
    )


def attention_to_all(seen: Seen, slots=None):
    """The same for softmaxes over all keys up to a query's own, as in SnapKV and H2O."""
    slots = seen.competing if slots is None else slots
    held, weights = len(seen.keys), []
    for age, group in zip(reversed(range(len(seen.window))), seen.window, strict=True):
        keys, bias = seen.keys[: held - age], seen.head.bias[: held - age]
        weights += [softmax(np.add(logits_of(q, keys), bias))[slots] for q in group]
    return np.mean(weights, axis=0) if slots else np.zeros(0)


def pooled(scores, width, how):
    """Each score with its neighbours, with zeros past the ends."""
    side = width // 2
    padded = np.concatenate([np.zeros(side), scores, np.zeros(side)])
    return np.array([how(padded[i : i + width]) for i in range(len(scores))])


def important_and_rare(seen: Seen, importance=0.07):
    """R-KV: softmaxes of the group's largest logits, pooled, less a softmax of mean cosines."""
    if not seen.competing:
        return np.zeros(0)
    keys, bias = ([x[s] for s in seen.competing] for x in (seen.keys, seen.head.bias))
    largest = [
        softmax(np.max([np.add(logits_of(q, keys), bias) for q in group], axis=0))
        for group in seen.window
    ]
    unit = [key / np.linalg.norm(key) for key in keys]
    cosines = np.array([[0.0 if a is b else a @ b for b in unit] for a in unit])
    for row in cosines:
        alike = np.flatnonzero(row > 0.5)
        if alike.size:
            row[alike[-1]] = 0.0
    redundancy = softmax(cosines.mean(axis=0))
    attended = pooled(np.mean(largest, axis=0), 7, np.max)
    return importance * attended - (1 - importance) * redundancy


def tracked(seen: Seen):
    """The method's tracked numbers."""
    return np.array([seen.head.numbers[slot] for slot in seen.competing])


def window_sums(seen: Seen):
    """H2O's start: the attention of the last queries to every token up to their own."""
    sums = np.zeros(len(seen.keys))
    for age, group in zip(reversed(range(len(seen.window))), seen.window, strict=True):
        keys = seen.keys[: len(sums) - age]
        sums[: len(keys)] += np.mean([softmax(logits_of(q, keys)) for q in group], axis=0)
    return sums


def uniform(budget):
    """The same number for all heads."""
    return lambda scores, seen: [budget] * len(seen)


def shared(scores, total, min_count, max_count):
    """Assigns slots one by one, to the head with the best next one."""
    best = [sorted(x, reverse=True) for x in scores]
    counts = [min(min_count, len(x)) for x in best]
    while sum(counts) < total:
        following = [
            -x[n] if n < min(max_count, len(x)) else np.inf
            for x, n in zip(best, counts, strict=True)
        ]
        if min(following) == np.inf:
            break
        counts[int(np.argmin(following))] += 1
    return counts


def joint(budget, min_count, max_count):
    """A layer's heads share their slots."""
    return lambda scores, seen: shared(scores, budget * len(seen), min_count, max_count)


def blended(counts, alpha):
    """(1 - α) of each count and α of their mean, α an exact fraction; the largest remainders are
    rounded up to restore the sum.
    """
    mean = Fraction(sum(counts), len(counts))
    wanted = [(1 - alpha) * c + alpha * mean for c in counts]
    kept = [math.floor(x) for x in wanted]
    for head in sorted(range(len(kept)), key=lambda h: kept[h] - wanted[h])[
        : sum(counts) - sum(kept)
    ]:
        kept[head] += 1
    return kept


def ada_kv(budget, alpha, max_count):
    """Ada-KV with its safeguard: heads share (1 - α) of their slots, and α are guaranteed; the
    competition stops where the blend would exceed the most slots of a head.
    """
    most = math.floor((max_count - alpha * budget) / (1 - alpha))
    return lambda scores, seen: blended(shared(scores, budget * len(seen), 0, most), alpha)


def num_needed(weights, p):
    """The number of the heaviest weights that carry the share p."""
    sums = np.cumsum(np.sort(weights)[::-1])
    return (
        0 if p <= 0 or not len(sums) or not sums[-1] else int(np.argmax(sums >= p * sums[-1])) + 1
    )


def needed_of(shares, lost, p):
    """The fewest of `shares`, heaviest first, such that at most 1 - p is lost without them.

    `lost` is the share of the slots dropped before.
    """
    order = np.sort(shares)[::-1]
    for count in range(len(order) + 1):
        if lost + order[count:].sum() <= 1 - p:
            return count
    return len(order)


def lost_by(seen: Seen, merged):
    """The share of attention of the merged slot; 0 if no slot competes."""
    return attention_to_all(seen, [merged])[0] if seen.competing else 0.0


def n_star(p, min_count, max_count, merged):
    """The fewest slots that bring the kept mass to p of real attention, for any scores.

    `merged` is the position of the merged slot.
    """

    def counts(scores, seen):
        return [
            int(
                np.clip(needed_of(attention_to_all(x), lost_by(x, merged), p), min_count, max_count)
            )
            for x in seen
        ]

    return counts


def union_scores(p):
    """Attention among the competing slots, plus 1 for those in any query's own top-p."""

    def score(seen):
        marked = np.zeros(len(seen.keys))
        held = len(seen.keys)
        for age, group in zip(reversed(range(len(seen.window))), seen.window, strict=True):
            keys, bias = seen.keys[: held - age], seen.head.bias[: held - age]
            for q in group:
                weights = softmax(np.add(logits_of(q, keys), bias))
                best = np.argsort(-weights)
                marked[best[: num_needed(weights, p)]] = 1
        return attention(seen) + marked[seen.competing]

    return score


def marked(min_count, max_count):
    """The number of slots with a score of 1 or more."""
    return lambda scores, seen: [
        int(np.clip(np.sum(np.asarray(x) >= 1), min_count, max_count)) for x in scores
    ]


def at_temperature(logits, temperature, p):
    """The number of slots that top-p keeps of Ŝ = softmax(g(z) / T)."""
    return num_needed(softmax(np.asarray(logits) / temperature), p)


def solved(logits, count, p):
    """The temperature nearest 1 at which top-p keeps `count` slots of Ŝ; the count grows with the
    temperature.
    """
    if at_temperature(logits, 1.0, p) == count:
        return 1.0
    colder = at_temperature(logits, 1.0, p) > count
    low, high = (-24.0, 0.0) if colder else (0.0, 12.0)
    for _ in range(60):
        middle = (low + high) / 2
        kept = at_temperature(logits, np.exp(middle), p)
        low, high = (middle, high) if kept < count + colder else (low, middle)
    return np.exp(low if colder else high)


def logarithm(scores):
    with np.errstate(divide="ignore"):
        return np.log(scores)


def calibrated(p, min_count, max_count, merged, logits=logarithm):
    """The slots that top-p keeps of Ŝ, at the temperature found first: there it is n* of real
    attention.

    The share kept of Ŝ is the share that the competing slots must keep of their attention.
    """

    def counts(scores, seen):
        found = []
        for own, x in zip(scores, seen, strict=True):
            count = 0
            if x.competing:
                shares, lost = attention_to_all(x), lost_by(x, merged)
                share = 1 - max(1 - p - lost, 0) / shares.sum()
                needed = needed_of(shares, lost, p)
                if x.head.temperature is None:
                    count = needed
                    x.head.temperature = solved(logits(own), needed, share) if needed else None
                else:
                    count = at_temperature(logits(own), x.head.temperature, share)
            found.append(int(np.clip(count, min_count, max_count)))
        return found

    return counts
