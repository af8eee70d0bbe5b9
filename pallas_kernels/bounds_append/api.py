"""Updates the key bounds of every page that new tokens touch."""

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
    """Updates the bounds for `valid[b]` tokens of row b, from each head's slot `first` on.

    `layer` must already contain these tokens and count them in its lengths. The bounds of touched
    pages are recomputed from K, so a rewritten token leaves no trace; no other page is read or
    written.

    Args:
        bounds: the bounds before the call.
        layer: the cache's layer.
        valid: the number of slots written in each row.
        first: the first slot written of each head.
        max_new: T, the maximum of `valid`; static.
        frame: the frame of 8-bit bounds; None: K as it is.
        implementation: "triton", "reference", or None to choose.

    Raises:
        ValueError: the frame does not match the layer, or bounds in K's dtype have a frame.
    """
    check_frame(bounds, layer, frame)
    # T slots that start within a page touch one page more
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
