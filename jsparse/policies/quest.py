"""Quest attends to the pages in which a token could have the greatest logit.

The least and the greatest value of every channel in a page, mid ± half, bound q·k for all its
tokens by q·mid + |q|·half; pages are ranked by that.

Paper: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al.),
arXiv:2406.10774. It leaves the first two layers dense: dense_layers(quest(…), n=2).

Where we differ: pages are ranked by q·mid + slack · |q|·half. The bound asks for one token that has
the worst value in every channel at once, which no real one comes near, so it ranks pages by how far
their channels reach rather than by what they hold for q. The query heads of a group share their
pages, ranked for their mean query (the paper has as many KV heads as query heads). This is Quest
(ours), quest(budget). The paper's rule, the greatest bound of the group, is Quest (paper),
quest(budget, slack=1, group="max"). The bounds can be kept in 8 bits per channel, in the frame of
the model's key constants, without which constant channels, such as those of Qwen2, would make every
step of the codes coarse.
"""

from functools import partial
from typing import NamedTuple, get_args

from jsparse.builder import builder
from jsparse.cache import LayerCache, StepView
from jsparse.cache.key_constants import KEY_CONSTANTS, KeyFrame, frame_at
from jsparse.hooks import State
from jsparse.hyper_parameters import number_in, one_of, whole_number
from jsparse.pallas_kernels import key_bounds
from jsparse.pallas_kernels.bounds_append import bounds_append
from jsparse.pallas_kernels.key_bounds import Bounds, PageBounds, PageBounds8
from jsparse.pallas_kernels.page_bounds import page_bounds
from jsparse.pallas_kernels.page_bounds.api import GroupQueries
from jsparse.policies.picks import best_pages
from jsparse.policies.sidecars import framed_sidecar, sidecar
from jsparse.policy import Policy
from jsparse.shapes import Queries

FORMS: dict[str | None, type[Bounds]] = {None: PageBounds, "uint8": PageBounds8}


class Settings(NamedTuple):
    """Holds the hyper-parameters, those of `quest`."""

    budget: int
    bounds_dtype: str | None
    slack: float
    group: GroupQueries

    @property
    def framed(self) -> bool:
        """Whether bounds are kept in the frame of the model's key constants."""
        return self.bounds_dtype is not None


@builder
def quest(
    budget: int = 1024,
    bounds_dtype: str | None = None,
    slack: float = 0.5,
    group: GroupQueries = "mean",
) -> Policy:
    """Attends to `budget` tokens, in the pages whose key bounds allow the greatest logits.

    These are budget // P pages, always including the newest, which is still being filled.

    Args:
        budget: the number of tokens that a KV head attends to.
        bounds_dtype: the type of the bounds; None is K's. "uint8" rounds bounds outward to 8 bits
            per channel, with a scale and a zero per page, in the frame of the model's key
            constants. Per page 2H + 4 bytes are kept and read, instead of K's 4H.
        slack: the part of the bounds' half range that counts, from 0 to 1; 1 in the paper. The
            default is the best on average of two models (bench/results/page_ranking).
        group: "mean" ranks pages for the mean query of the heads that share a KV head, "max" by the
            greatest score among them.
    """
    whole_number("budget", budget, 1)
    one_of("bounds_dtype", bounds_dtype, FORMS)
    number_in("slack", slack, "[0, 1]")
    one_of("group", group, get_args(GroupQueries))
    settings = Settings(budget, bounds_dtype, slack, group)
    build = framed_sidecar if settings.framed else sidecar
    kept = build(partial(key_bounds.init, form=FORMS[bounds_dtype]), taken_in)
    return Policy(
        partial(select, settings),
        **kept._asdict(),
        needs=KEY_CONSTANTS if settings.framed else (),
        shares="pages",
        reads=0,
    )


def taken_in(
    entry: Bounds, kv: LayerCache, k, valid, first, /, *, frame: KeyFrame | None = None
) -> Bounds:
    """Takes new tokens into the bounds of their pages."""
    return bounds_append(entry, kv, valid, first, max_new=k.shape[1], frame=frame)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the pages of largest q·mid + slack · |q|·half, and the newest."""
    kv = view.layers[layer]
    frame = frame_at(view, layer) if settings.framed else None
    scores = page_bounds(
        q, kv, state[layer], frame=frame, slack=settings.slack, group=settings.group
    )
    return best_pages(scores, kv, settings.budget), None, state
