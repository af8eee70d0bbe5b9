"""The requirements of a recommendation, and its default candidates."""

from typing import NamedTuple

from jsparse.hyper_parameters import whole_number
from jsparse.policies.expressions import parse

DENSE = "dense()"
PAGE_SIZE, MIN_LENGTH = 16, 512


class Requirements(NamedTuple):
    """The sizes of a measurement, and the required closeness to dense attention.

    Attributes:
        context: the tokens in the cache of each sequence.
        batch: the sequences that decode together.
        policies: the candidates' expressions.
        kl: the maximum mean KL divergence from dense attention, in nats.
        exact: whether every greedy choice along the text must also be dense attention's.
        samples: the number of texts, and of pass keys of each kind.
        steps: the decode steps per text.
    """

    model: str
    context: int
    batch: int
    policies: tuple[str, ...]
    kl: float = 0.02
    exact: bool = False
    samples: int = 8
    steps: int = 32


def candidates(context: int) -> list[str]:
    """Returns the default candidates' expressions, with budgets for a context.

    They need neither training nor calibration. Those with a minimum budget above the context are
    omitted.
    """
    eighth, quarter = (_whole_pages(context // parts) for parts in (8, 4))
    usual = [
        "twilight(all_pages(), p=0.95)",
        f"twilight(quest(budget={quarter}), p=0.95)",
        f"quest(budget={eighth})",
        f"dense_layers(quest(budget={eighth}), n=2)",
        f"dense_layers(quest(budget={quarter}), n=2)",
        f"double_sparsity(budget={_whole_pages(context // 16)})",
        f"lychee_cluster(budget={eighth})",
        "lfps(budget=0.04)",
        f"ada_kv(budget={quarter})",
        f"streaming(sink=4, recent={eighth - PAGE_SIZE})",
    ]
    return [expression for expression in usual if _builds(expression)]


def _builds(expression: str) -> bool:
    try:
        parse(expression)
    except ValueError:
        return False
    return True


def _whole_pages(tokens: int) -> int:
    return max(tokens // PAGE_SIZE, 2) * PAGE_SIZE


def checked(requirements: Requirements, longest: int) -> Requirements:
    """Returns the requirements with canonical policy names, without duplicates and dense()."""
    for name in ("context", "batch", "samples", "steps"):
        whole_number(name, getattr(requirements, name), 1)
    if not MIN_LENGTH <= requirements.context <= longest:
        raise ValueError(
            f"context={requirements.context}: must be from {MIN_LENGTH}, which pass keys need, to "
            f"{longest}, the model's maximum"
        )
    if not requirements.kl >= 0:
        raise ValueError(f"kl={requirements.kl}: must be a number of nats from 0 up")
    names = dict.fromkeys(parse(policy).name for policy in requirements.policies)
    policies = tuple(name for name in names if name != DENSE)
    if not policies:
        raise ValueError(
            f"policies={list(requirements.policies)}: must name one other than dense()"
        )
    return requirements._replace(policies=policies)
