"""Defines EngineOptions, which LLM, AsyncEngine, Engine and `jsparse serve` share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jsparse.hyper_parameters import flag, number_in, whole_number
from jsparse.policies.prefill_methods import as_method
from jsparse.policy import PrefillMethod
from jsparse.runtime.generate_options import num_drafts


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine; LLM and AsyncEngine take them by name.

    Attributes:
        max_num_seqs: the maximum batch size, in sequences; None: 64 on a GPU, 8 if the policy is
            offloaded, and 8 on a CPU. A step computes this number of rows whether or not they hold
            requests.
        max_model_len: the maximum context length: prompt and completion together; None: the model's
            maximum on a GPU, and at most 2048 on a CPU, where attention processes all of it.
        max_waiting: the most requests that may wait for a slot; None: unlimited. AsyncEngine and
            servers have 1024.
        kv_cache_tokens: the size of the KV cache, in tokens; None: all that
            `gpu_memory_utilization` allows; on a CPU and in host memory, no more than all slots and
            a prompt can use.
        gpu_memory_utilization: the share of the device's memory (of its free memory on a CPU) that
            the model, K and V and the policy's state may take; programs need the rest.
        kv_offloading_size: the GiB of host memory for K and V that must leave the device: cached
            prefixes, which later prompts bring back instead of computing them, and sequences that
            are preempted when others need their memory. 0: the prefixes are dropped, and those
            others wait.
        page_size: the number of tokens per page.
        enable_prefix_caching: whether a prefix that several prompts, or a prompt and an earlier
            sequence, have in common is computed once, if `policy` can share it.
        prefill: how prompts attend to themselves: "dense", or the expression of a method of sparse
            prefill, as for `jsparse.generate`.
        per_request: the names of the hyper-parameters that requests may set, among those that the
            policy lists in `per_row`, and "dense". Each makes the step a little slower.
        layer_stats: whether outputs hold the attended and read shares of each layer and step;
            "newest": only those of the newest step, for live views.
        steps_per_program: the most decode steps per program; None: 32 on a GPU, 1 on a CPU. A
            program has fewer if they take more than 100 ms, or half of `max_stall_ms`, and at most
            8 while requests wait.
        decode_rows: the numbers of rows of decode programs, ascending to `max_num_seqs`; a step
            runs the smallest that fits. None: 8, 16, … and all on a GPU, 1 and all on a CPU.
        prefill_rows: the numbers of prompts in prefill programs for short chunks, ascending from 1;
            None: 1 and 8 on a GPU, 1 on a CPU.
        ladder: the sizes of prefill chunks, as (position, size) pairs, from position 0 on; None:
            512 and more on a GPU, depending on the model, and 64 on a CPU (128 with a sparse
            `prefill`, whose blocks of 128 queries begin where chunks do).
        max_stall_ms: the most milliseconds that a sequence waits for its next tokens during
            prefill, if the chunk sizes of the ladder allow it; a decode program takes at most half
            of it. 0: one step at a time, after each chunk. None: all prompts that fit are prefilled
            first, which is fastest if no client waits for single tokens. AsyncEngine and servers
            have 200.
        batch_invariant: whether a request gets the same bits in any batch, and whether or not its
            prefix is cached. Programs then have one step, prefill one prompt and decode all rows,
            and the starts of chunks depend on position alone.
        cascade_attention: whether dense layers read long shared prefixes once for all rows that
            share them. Such programs are compiled when they are first useful. None: true on a GPU
            if half of the policy's layers are dense.
        exact: whether the policy only drafts, and dense attention verifies its drafts, so that the
            output is that of dense attention; not with `batch_invariant` or `cascade_attention`. A
            token's shares are the means of the drafts that were made with it, 1 if there were none.
        num_speculative_tokens: with `exact`, the number of tokens drafted per verification round,
            up to 32; None: chosen from the accepted drafts and the times of rounds.
        prepare: whether all programs, except those that return likely tokens, are compiled now and
            not on first use; "logprobs": also these. On a CPU this waits only for the programs that
            any request needs; the rest are compiled in the background. None: true on a GPU, which
            then also runs each program once, since a first run takes longer.
        check_ranks: whether the devices of a model that is spread over several are compared after
            each program: the engine fails unless they chose the same tokens. This is slower.

    Raises:
        ValueError: an option is out of its range, or excludes another.
    """

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_waiting: int | None = None
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_offloading_size: float = 0.0
    page_size: int = 16
    enable_prefix_caching: bool = True
    prefill: PrefillMethod | str = "dense"
    per_request: Sequence[str] = ()
    layer_stats: bool | Literal["newest"] = False
    steps_per_program: int | None = None
    decode_rows: Sequence[int] | None = None
    prefill_rows: Sequence[int] | None = None
    ladder: Sequence[tuple[int, int]] | None = None
    max_stall_ms: float | None = None
    batch_invariant: bool = False
    cascade_attention: bool | None = None
    exact: bool = False
    num_speculative_tokens: int | None = None
    prepare: bool | Literal["logprobs"] | None = None
    check_ranks: bool = False

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_model_len": 1, "max_waiting": 0, "kv_cache_tokens": 1}
        for name, minimum in least.items():
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, minimum)
        as_method(self.prefill)
        if self.prepare not in (None, "logprobs"):
            flag("prepare", self.prepare)
        if self.cascade_attention is not None:
            flag("cascade_attention", self.cascade_attention)
        for name in ("enable_prefix_caching", "check_ranks", "batch_invariant"):
            flag(name, getattr(self, name))
        if self.max_stall_ms is not None:
            number_in("max_stall_ms", self.max_stall_ms, "[0, inf)")
        number_in("kv_offloading_size", self.kv_offloading_size, "[0, inf)")
        number_in("gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]")
        if self.batch_invariant and self.drafts != 0:
            raise ValueError(
                "exact=True: must be False if batch_invariant is true: rounding depends on the "
                "number of tokens verified together, and so on when results arrive"
            )

    @property
    def drafts(self) -> int | None:
        """The tokens drafted per verification round; 0: nothing is verified; None: automatic."""
        return num_drafts(self.exact, self.num_speculative_tokens)

    def only(self, where: str, **values: object) -> "EngineOptions":
        """Returns the options with `values`, the only ones allowed if the condition `where` holds.

        Raises:
            ValueError: an option was given another value.
        """
        for name, value in values.items():
            given = getattr(self, name)
            if given is not None and value != (list(given) if name.endswith("rows") else given):
                raise ValueError(f"{name}={given!r}: must be {value!r} if {where}")
        return replace(self, **values)  # pyright: ignore[reportArgumentType]
