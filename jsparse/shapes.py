"""The axis letters that all signatures of the package use to spell array shapes.

    B batch            T query length      S cached length (slots)     V vocabulary
    N query heads      K KV heads          G = N / K group size        H head dimension
    D model dimension  F MLP dimension     L layers
    P tokens per page  M pages of a head   C capacity of a selection   W prompt-end queries kept

A token's "slot" is its index in its head's cache; its "position" is its index in the text, which
RoPE needs. They are equal until a policy compacts a head.
"""

from jaxtyping import Array, Bool, Float, Int32, UInt32

Queries = Float[Array, "B N H"]
ChunkQueries = Float[Array, "B T N H"]
ChunkKV = Float[Array, "B T K H"]
Pages = Float[Array, "pages P H"]
BlockTable = Int32[Array, "B K M"]
Lengths = Int32[Array, "B K"]
Rows = Int32[Array, "B"]
Tokens = Int32[Array, "B T"]
HeadFlags = Bool[Array, "B K"]
Ids = Int32[Array, "B K C"]
Bits = UInt32[Array, "B K C"]
