"""Updates the bounds of every page that new tokens touch."""

from jsparse.cache import LayerCache
from jsparse.cache.key_constants import KeyFrame
from jsparse.pallas_kernels.bounds_append import reference
from jsparse.pallas_kernels.checked import checked
from jsparse.pallas_kernels.dispatch import Backend, no_triton, run
from jsparse.pallas_kernels.key_bounds import Bounds, check_frame
from jsparse.shapes import Lengths, Rows


def _load_triton():
    from jsparse.pallas_kernels.bounds_append import triton_gpu

    return triton_gpu.bounds_append


BACKENDS = (
    Backend("triton", _load_triton, lambda *_, **__: no_triton()),
    Backend("reference", lambda: reference.bounds_append),
)


@checked()
def bounds_append(
    bounds: Bounds,
    layer: LayerCache,
    valid: Rows,
    first: Lengths,
    *,
    max_new: int,
    frame: KeyFrame | None = None,
    implementation: str | None = None,
) -> Bounds:
    """Updates the bounds for `valid[b]` tokens of row b, at each head's slots from `first` on.

    `layer` must hold these tokens already, and its lengths must count them. The bounds of the pages
    that they touch are computed afresh from K, so that a token written again leaves nothing behind;
    no other page is read or written.

    Args:
        bounds: the bounds before the call.
        layer: the cache's layer.
        valid: the number of slots that were written in each row.
        first: the first slot of each head that was written.
        max_new: T, the most that `valid` can be; static.
        frame: the frame that 8-bit bounds are kept in; None keeps K as it is.
        implementation: "triton", "reference", or None to pick.

    Raises:
        ValueError: the frame does not fit the layer, or bounds in K's dtype are given one.
    """
    check_frame(bounds, layer, frame)
    # T slots that do not start on a page's edge touch one page more
    touched = (max_new + layer.page_size - 2) // layer.page_size + 1
    return run(
        "bounds_append",
        implementation,
        BACKENDS,
        bounds,
        layer,
        valid,
        first,
        touched=touched,
        frame=frame,
    )
