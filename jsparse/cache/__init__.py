"""The paged KV cache, and the pure functions that append to it, read it and shrink it.

The cache is head-major and has one entry per layer. A physical page has P tokens of ONE KV head of
ONE row. A block table maps page m of head (b, k) to its physical page. Without a table the mapping
is the identity: physical page (b·K + k)·M + m, so that reading a whole head is a reshape.
"""

from jsparse.cache.int8_pages import KEY_REACH, Int8Pages, arrays_of, with_arrays
from jsparse.cache.layers import (
    FreeList,
    HostPages,
    KVCache,
    LayerCache,
    PagePool,
    SharedPrefixes,
    TieredPool,
)
from jsparse.cache.placing import map_pages, placed
from jsparse.cache.reading import (
    one_head,
    physical_pages,
    read_heads,
    read_pages,
    read_slots,
    rounded,
    rounded_to,
    slot_positions,
)
from jsparse.cache.spec import CacheSpec
from jsparse.cache.views import (
    NOTHING,
    ReadOnly,
    StepView,
    step_view,
    taking_part,
    with_host,
    without_borrowed,
)
from jsparse.cache.writing import (
    OPTIONAL_FIELDS,
    append,
    as_held,
    cut_pages,
    fill,
    finite,
    grow,
    init,
    level,
    once,
    replace_layer,
    spec_of,
    taken,
    truncate,
    write,
    write_beside,
)

__all__ = [
    "KEY_REACH",
    "NOTHING",
    "OPTIONAL_FIELDS",
    "CacheSpec",
    "FreeList",
    "HostPages",
    "Int8Pages",
    "KVCache",
    "LayerCache",
    "PagePool",
    "ReadOnly",
    "SharedPrefixes",
    "StepView",
    "TieredPool",
    "append",
    "arrays_of",
    "as_held",
    "cut_pages",
    "fill",
    "finite",
    "grow",
    "init",
    "level",
    "map_pages",
    "once",
    "one_head",
    "physical_pages",
    "placed",
    "read_heads",
    "read_pages",
    "read_slots",
    "replace_layer",
    "rounded",
    "rounded_to",
    "slot_positions",
    "spec_of",
    "step_view",
    "taken",
    "taking_part",
    "truncate",
    "with_arrays",
    "with_host",
    "without_borrowed",
    "write",
    "write_beside",
]
