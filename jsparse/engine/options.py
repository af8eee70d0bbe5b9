"""Defines EngineOptions, which LLM, AsyncEngine, Engine and `jsparse serve` share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jsparse.hyper_parameters import flag, number_in, whole_number
from jsparse.runtime.generate_options import num_drafts


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine; LLM and AsyncEngine take them by name.

    Attributes:
        max_num_seqs: the most requests that decode together; None: 64 on a GPU, 8 where the
            policy is offloaded, and 8 on a CPU. A step computes this many rows whether or not
            they hold requests.
        max_model_len: the most tokens of prompt and answer together; None: the model's maximum on
            a GPU and at most 2048 on a CPU, where attention walks through all of it.
        max_waiting: the most requests that may wait for a slot; None: any number. AsyncEngine and
            servers have 1024.
        kv_cache_tokens: the tokens whose K and V the engine holds; None: as many as
            `gpu_memory_utilization` allows; on a CPU and in host memory, no more than all slots
            and a prompt can use.
        gpu_memory_utilization: the share of the device's memory, on a CPU of its free memory, that
            model, K and V and the policy's state may take; programs need the rest.
        swap_space: the GiB of host memory for K and V of sequences that are swapped out when others
            need their device memory; 0: those others wait instead. It helps where it and the
            device's memory hold all that sequences can need.
        page_size: the number of tokens per page.
        enable_prefix_caching: whether a prefix that prompts, or a prompt and an earlier sequence,
            share is computed once, if `policy` can.
        per_request: the names of the hyper-parameters that requests may set, among those that the
            policy lists in `per_row`, and "dense". Each makes the step a little slower.
        layer_stats: whether outputs hold the shares attended and read of each layer and step;
            "newest" keeps those of the newest step alone, for live views.
        steps_per_program: the most decode steps per program; None: 32 on a GPU, 1 on a CPU. A
            program has fewer where they take more than 100 ms, or half of `max_stall_ms`, and 8 at
            most while requests wait.
        decode_rows: the numbers of rows of decode programs, ascending to `max_num_seqs`; a step
            runs the smallest that fits. None: 8, 16, … and all on a GPU, 1 and all on a CPU.
        prefill_rows: the numbers of prompts of which a program computes short chunks, ascending
            from 1; None: 1 and 8 on a GPU, 1 on a CPU.
        ladder: the sizes of prompt chunks, as (position, size) pairs, from position 0 on; None:
            512 and more on a GPU, by the model, and 64 on a CPU.
        max_stall_ms: the milliseconds for which a sequence may wait for its next tokens during
            prefill, as far as chunks of the ladder's sizes allow, and twice those that a decode
            program takes; 0: one step at a time, after each chunk. None, the fastest where nobody
            waits for single tokens: all prompts for which there is room come first. AsyncEngine
            and servers have 200.
        batch_invariant: whether a request gets the same bits in any company, and whether or not
            its prompt's prefix is cached. Programs then have one step, compute chunks of one
            prompt and decode all rows, and chunks begin where position alone says.
        cascade_attention: whether dense layers read shared prefixes once for all rows that share
            them, where these are long. Such programs are compiled when they are first useful.
            None: true on a GPU if half of the policy's layers are dense.
        exact: whether the policy only drafts, and dense attention verifies its drafts, so that
            sequences are dense attention's own; not with `batch_invariant` or
            `cascade_attention`. A token's shares are the means of the drafts that were made with
            it, 1 where none was.
        num_speculative_tokens: with `exact`, the tokens drafted between two checks, up to 32;
            None: chosen from the drafts accepted and the time that rounds took.
        prepare: whether all programs, but those that return likely tokens, are compiled now and
            not on first use; "logprobs": also these. On a CPU this waits only for the programs that
            any request needs; the rest are compiled in the background. None: true on a GPU, which
            then also runs each once, since a first run takes longer.
        check_ranks: whether the devices of a model that is spread over several are compared after
            each program: they must have chosen the same tokens, or the engine fails. It is slower.

    Raises:
        ValueError: an option is out of its range, or excludes another.
    """

    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_waiting: int | None = None
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0.0
    page_size: int = 16
    enable_prefix_caching: bool = True
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
        if self.prepare not in (None, "logprobs"):
            flag("prepare", self.prepare)
        if self.cascade_attention is not None:
            flag("cascade_attention", self.cascade_attention)
        for name in ("enable_prefix_caching", "check_ranks", "batch_invariant"):
            flag(name, getattr(self, name))
        if self.max_stall_ms is not None:
            number_in("max_stall_ms", self.max_stall_ms, "[0, inf)")
        number_in("swap_space", self.swap_space, "[0, inf)")
        number_in("gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]")
        if self.batch_invariant and self.drafts != 0:
            raise ValueError(
                "exact=True: must be False where batch_invariant is true: how many tokens are "
                "verified together depends on when results arrive, and rounding on that"
            )

    @property
    def drafts(self) -> int | None:
        """The tokens drafted between two checks; 0: nothing is verified; None: to be chosen."""
        return num_drafts(self.exact, self.num_speculative_tokens)

    def only(self, where: str, **values: object) -> "EngineOptions":
        """Returns the options with `values`, the only ones possible `where` something holds.

        Raises:
            ValueError: an option was given another value.
        """
        for name, value in values.items():
            given = getattr(self, name)
            if given is not None and value != (list(given) if name.endswith("rows") else given):
                raise ValueError(f"{name}={given!r}: must be {value!r} where {where}")
        return replace(self, **values)  # pyright: ignore[reportArgumentType]
