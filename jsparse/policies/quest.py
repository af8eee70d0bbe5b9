"""Quest attends to the pages in which a token could have the highest logit.

The minimum and maximum of every channel in a page, mid ± half, bound q·k for all its tokens by
q·mid + |q|·half; pages are ranked by this bound.

Paper: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al.),
arXiv:2406.10774. It leaves the first two layers dense: dense_layers(quest(…), n=2).

Where we differ: pages are ranked by q·mid + slack · |q|·half. The bound assumes one token with the
worst value in every channel at once. No real token comes close, so the bound ranks pages by the
range of their channels rather than by their content for q. The query heads of a group share their
pages, ranked for their mean query (the paper's models have one query head per KV head). This is
Quest (ours), quest(budget). The paper's rule, the highest bound of the group, is Quest (paper),
quest(budget, slack=1, group="max"). The bounds can be stored in 8 bits per channel, in the frame of
the model's key constants; without the frame, constant channels, such as those of Qwen2, would make
every step of the codes coarse.
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
    """The hyper-parameters of `quest`."""

    budget: int
    bounds_dtype: str | None
    slack: float
    group: GroupQueries

    @property
    def framed(self) -> bool:
        """Whether bounds are stored in the frame of the model's key constants."""
        return self.bounds_dtype is not None


@builder
def quest(
    budget: int = 1024,
    bounds_dtype: str | None = None,
    slack: float = 0.5,
    group: GroupQueries = "mean",
) -> Policy:
    """Attends to `budget` tokens, in the pages whose key bounds allow the highest logits.

    These are budget // P pages, always including the newest, partly filled one.

    Args:
        budget: the number of tokens that a KV head attends to.
        bounds_dtype: the type of the bounds; None: K's. "uint8" rounds bounds outward to 8 bits per
            channel, with a scale and a zero point per page, in the frame of the model's key
            constants. It stores and reads 2H + 4 bytes per page, instead of 4H in K's type.
        slack: the weight of the bounds' half range, from 0 to 1; 1 in the paper. The default is the
            best on average of two models (bench/results/page_ranking).
        group: "mean" ranks pages for the mean query of the heads that share a KV head, "max" by the
            highest score among them.
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
    """Updates the bounds of the new tokens' pages."""
    return bounds_append(entry, kv, valid, first, max_new=k.shape[1], frame=frame)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the pages with the largest q·mid + slack · |q|·half, and the newest."""
    kv = view.layers[layer]
    frame = frame_at(view, layer) if settings.framed else None
    scores = page_bounds(
        q, kv, state[layer], frame=frame, slack=settings.slack, group=settings.group
    )
    return best_pages(scores, kv, settings.budget), None, state
