"""Ranks policies by the time of their steps and their closeness to dense attention."""

from collections.abc import Mapping, Sequence
from typing import Any

from jsparse.benchmark.requirements import DENSE, Requirements
from jsparse.evaluation.store import Entry

STEPS, REFUSED = "steps", "refused"
KL, TURNS = "kl", ("passkey", "passkey_turn2")
EXACT = {0: {"kl": 0.0, "agreement": 1.0}}  # the closeness of dense attention to itself
NO_KL, NO_KEYS = "not compared with dense attention", "slower than the one to take"
# minimum speedup over dense attention that is worth a difference in the text
MIN_GAIN = 1.02


def ranked(entries: Sequence[Entry], requirements: Requirements) -> list[dict[str, Any]]:
    """Returns a dict for dense attention and each candidate, the recommended ones first.

    Keys: policy; ms (per step); over_dense; kl and agreement, means over the texts; found and lost,
    the numbers of pass keys of each kind that the policy finds, and that only dense attention
    finds; of, their total; verdict, the reason against it, or "". Missing measurements are None.
    """
    values: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    refused: dict[str, str] = {}
    for entry in entries:
        if entry["task"] == REFUSED:
            refused[entry["policy"]] = f"{REFUSED}: {entry['meta']['reason']}"
        else:
            of_cell = values.setdefault((entry["policy"], entry["task"]), {})
            of_cell[entry["index"]] = entry["values"]
    dense_ms = values[DENSE, STEPS][0]["ms"]
    rows = []
    for policy in (DENSE, *requirements.policies):
        timed = values.get((policy, STEPS), {}).get(0)
        row: dict[str, Any] = {
            "policy": policy,
            "ms": timed and timed["ms"],
            "over_dense": dense_ms / timed["ms"] if timed else 0.0,
            **_closeness(values.get((policy, KL)) or (EXACT if policy == DENSE else {})),
            **_found(values, policy),
        }
        row["verdict"] = refused.get(policy) or _verdict(row, requirements)
        rows.append(row)
    return sorted(rows, key=lambda row: (bool(row["verdict"]), -row["over_dense"]))


def _closeness(texts: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    names = ("kl", "agreement")
    return {
        name: sum(text[name] for text in texts.values()) / len(texts) if texts else None
        for name in names
    }


def _found(values: Mapping[tuple[str, str], Mapping[int, Any]], policy: str) -> dict[str, Any]:
    found, lost, of = {}, {}, 0
    for task in TURNS:
        own, dense = values.get((policy, task), {}), values.get((DENSE, task), {})
        of = max(of, len(own))
        found[task] = sum(sample["score"] == 1 for sample in own.values()) if own else None
        lost[task] = sum(own[i]["score"] < dense[i]["score"] for i in own if i in dense)
    return {"found": found, "lost": lost, "of": of}


def _verdict(row: Mapping[str, Any], requirements: Requirements) -> str:
    """Returns the reason against a policy, or ""."""
    if row["policy"] == DENSE:
        return ""
    if row["ms"] is None:
        return "not measured yet"
    if row["over_dense"] < MIN_GAIN:
        return "no faster than dense attention"
    if row["kl"] is None:
        return NO_KL
    if requirements.exact and row["agreement"] < 1:
        return f"chooses another token at {1 - row['agreement']:.1%} of the positions"
    if row["kl"] > requirements.kl:
        return f"KL above {requirements.kl:g}"
    if None in row["found"].values():
        return NO_KEYS
    for task, words in zip(TURNS, ("", " that a later turn asks for"), strict=True):
        if row["lost"][task]:
            return f"loses {row['lost'][task]} of {row['of']} pass keys{words}"
    return ""
