"""Defines the command `jsparse serve`."""

import re
from functools import partial
from typing import Annotated, Literal

from typer import Option

from jsparse.cli import hosts
from jsparse.cli.options import (
    LoadingOptions,
    ModelOption,
    PolicyOption,
    require,
    takes_model,
    takes_options,
)
from jsparse.machine.extras import install

HostOption = Annotated[str, Option(help="Address to listen on; 0.0.0.0 is every one.")]
PortOption = Annotated[int, Option(help="Port to listen on; 0 picks a free one.")]
MaxModelLenOption = Annotated[
    int | None,
    Option(help="Most tokens of prompt and answer; the default is the model's on a GPU."),
]
MaxNumSeqsOption = Annotated[
    int | None,
    Option(help="Most requests that decode together; the default is 64 on a GPU, else 8."),
]
GpuMemoryUtilizationOption = Annotated[
    float,
    Option(help="Share of the memory that model, K and V and the policy's state may take."),
]
SwapSpaceOption = Annotated[
    float,
    Option(help="GiB of host memory for K and V of answers that make room for others."),
]
DataParallelSizeOption = Annotated[
    int,
    Option(
        help="Number of engines, each in a process and on GPUs of its own, to which requests are "
        "sent by their beginnings and by what each engine has to do."
    ),
]
CheckRanksOption = Annotated[
    bool,
    Option(
        "--check-ranks",
        help="Compare what the GPUs of a model have chosen after each program, and fail if it "
        "differs; slower.",
    ),
]
EnablePrefixCachingOption = Annotated[
    bool, Option(help="Whether requests share what others have read of the same prompt.")
]
ApiKeyOption = Annotated[
    str | None,
    Option(envvar="JSPARSE_API_KEY", help="Key that clients must send.", show_envvar=True),
]
ServedModelNameOption = Annotated[
    str | None, Option(help="Name of the model for clients; the default is the model as given.")
]
MaxWaitingOption = Annotated[int, Option(help="Most requests that wait; further ones get 429.")]
MaxStallMsOption = Annotated[
    float,
    Option(help="Milliseconds for which an answer may wait for its next tokens."),
]
ExactOption = Annotated[
    bool,
    Option(
        "--exact",
        help="Let dense attention check what the policy drafts: answers are the ones that dense "
        "attention gives.",
    ),
]
NumSpeculativeTokensOption = Annotated[
    int | None,
    Option(
        help="With --exact, the tokens drafted between two checks. By default that is chosen as it "
        "goes, from the drafts accepted and the time that rounds took."
    ),
]
BatchInvariantOption = Annotated[
    bool, Option(help="Whether a request gets the same bits in any company; slower.")
]
MaxLogprobsOption = Annotated[
    int,
    Option(help="Most likely tokens that requests may ask for; without any it starts sooner."),
]
DefaultMaxTokensOption = Annotated[
    int | None,
    Option(
        help="Most tokens of answers to chats that name no number; the default is as many as "
        "there is room for."
    ),
]
PerRequestOption = Annotated[
    list[str] | None,
    Option(
        metavar="<name>",
        help="Hyper-parameter of the policy that requests may set, such as p, or dense. "
        "Repeatable.",
    ),
]
SeedOption = Annotated[
    int | None,
    Option(help="Random seed of requests that name none; the default is drawn at the start."),
]
DrainSecondsOption = Annotated[
    float, Option(help="Seconds that SIGTERM leaves to the requests that have begun.")
]
AllowedHostOption = Annotated[
    list[str] | None,
    Option(
        metavar="<host>",
        help="Further name under which browsers may reach a server of this machine alone that "
        "has no key; * is any. Repeatable.",
    ),
]
AllowedOriginsOption = Annotated[
    list[str] | None,
    Option(
        metavar="<origin>",
        help="Origin, such as http://localhost:3000, whose pages may use the server from a "
        "browser; * is any. Repeatable.",
    ),
]
SpecialTokensInMessagesOption = Annotated[
    bool,
    Option(help="Whether special tokens spelled in messages count: users could write turns."),
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"],
    Option(
        help="Least level of what is logged: info has a line for each request, and how fast "
        "the engine is every ten seconds; warning only what goes wrong."
    ),
]


@takes_model
@takes_options(LoadingOptions, "loading")
def serve(
    loading: LoadingOptions,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "dense",
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = 0.9,
    swap_space: SwapSpaceOption = 0.0,
    data_parallel_size: DataParallelSizeOption = 1,
    nnodes: hosts.NnodesOption = 1,
    node_rank: hosts.NodeRankOption = 0,
    master_addr: hosts.MasterAddrOption = None,
    master_port: hosts.MasterPortOption = 29500,
    headless: hosts.HeadlessOption = False,
    check_ranks: CheckRanksOption = False,
    enable_prefix_caching: EnablePrefixCachingOption = True,
    api_key: ApiKeyOption = None,
    served_model_name: ServedModelNameOption = None,
    max_waiting: MaxWaitingOption = 1024,
    max_stall_ms: MaxStallMsOption = 200.0,
    batch_invariant: BatchInvariantOption = False,
    exact: ExactOption = False,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    max_logprobs: MaxLogprobsOption = 20,
    default_max_tokens: DefaultMaxTokensOption = None,
    per_request: PerRequestOption = None,
    seed: SeedOption = None,
    drain_seconds: DrainSecondsOption = 30.0,
    allowed_host: AllowedHostOption = None,
    allowed_origins: AllowedOriginsOption = None,
    special_tokens_in_messages: SpecialTokensInMessagesOption = False,
    log_level: LogLevelOption = "info",
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Requests join and leave one running batch. SIGTERM lets those finish that have begun.

    Example: jsparse serve smollm2 --policy "quest(budget=1024)" --max-model-len 2048
    """
    try:
        from jsparse.server import descriptors, log, origins, run
        from jsparse.server.engines import describe, load_engine
        from jsparse.server.front import Options
        from jsparse.server.replicas import serve as replicas
    except ModuleNotFoundError as error:
        if str(error.name).startswith("jsparse"):
            raise
        raise ValueError(
            f"jsparse serve needs the package {error.name}: {install('server')}"
        ) from None
    from jsparse.policies.own_code import resolve

    _check_numbers(port, max_waiting, max_logprobs, default_max_tokens, seed, drain_seconds)
    tensor_parallel_size = loading.tensor_parallel_size
    for option, size in (("data", data_parallel_size), ("tensor", tensor_parallel_size)):
        require(f"--{option}-parallel-size", size, size >= 1, "at least 1")
    _check_key(api_key)
    allowed = origins.checked(allowed_origins or ())
    if data_parallel_size > 1:
        _leave_gpus_to_engines()
    resolve(policy)  # what is wrong with it is told before anything is loaded
    answers = hosts.join(
        *(tensor_parallel_size, data_parallel_size),
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        headless=headless,
    )
    log.show(log_level)
    descriptors.raise_limit(2 if data_parallel_size > 1 else 1)
    make_engine = partial(
        *(load_engine, model, policy),
        **vars(loading),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        swap_space=swap_space,
        enable_prefix_caching=enable_prefix_caching,
        max_waiting=max_waiting,
        max_stall_ms=max_stall_ms,
        batch_invariant=batch_invariant,
        exact=exact,
        check_ranks=check_ranks,
        num_speculative_tokens=num_speculative_tokens,
        per_request=tuple(per_request or ()),
        layer_stats="newest",
        # else the first request for likely tokens would wait for them, and all others with it
        prepare="logprobs" if max_logprobs else True,
    )
    if not answers:
        make_engine()  # and works for process 0, until that ends
        return
    listening = run.listen(host, port)
    address, at = listening.getsockname()[:2]

    def on_ready(about: tuple[str, str]) -> None:
        where = f"[{address}]" if ":" in address else address
        name, (run_by, what) = options.name, about
        by = f"{run_by} in {data_parallel_size} processes" if data_parallel_size > 1 else run_by
        if tensor_parallel_size > 1:
            by += f" on {tensor_parallel_size} devices{' each' * (data_parallel_size > 1)}"
        print(f"jsparse serves {name} with {by} at http://{where}:{at}", flush=True)
        print(what, flush=True)
        print(f"A page to chat and to see what is read: http://{where}:{at}/", flush=True)

    options = Options(
        served_model_name or model,
        api_key,
        max_waiting,
        max_logprobs=max_logprobs,
        default_max_tokens=default_max_tokens,
        hosts=None if api_key else run.own_names(address, host, allowed_host or ()),
        origins=allowed,
        special_tokens=special_tokens_in_messages,
        drain_seconds=drain_seconds,
    )
    if data_parallel_size == 1:
        make = partial(make_engine, seed=seed)
        run.serve(options, make, listening, on_ready=lambda engine: on_ready(describe(engine)))
    else:
        seeds = [seed if seed is None else seed + nth for nth in range(data_parallel_size)]
        engines = [partial(make_engine, seed=each) for each in seeds]
        replicas.serve(options, engines, tensor_parallel_size, listening, on_ready=on_ready)


def _leave_gpus_to_engines() -> None:
    """Keeps this process from claiming a GPU's memory, as code of a user's policy might."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _check_numbers(
    port: int,
    max_waiting: int,
    max_logprobs: int,
    default_max_tokens: int | None,
    seed: int | None,
    drain_seconds: float,
) -> None:
    """Raises ValueError if a number is out of range."""
    require("--port", port, 0 <= port <= 65535, "from 0 to 65535")
    require("--max-waiting", max_waiting, max_waiting >= 0, "at least 0")
    require("--max-logprobs", max_logprobs, 0 <= max_logprobs <= 20, "from 0 to 20")
    if default_max_tokens is not None:
        require("--default-max-tokens", default_max_tokens, default_max_tokens > 0, "at least 1")
    require("--seed", seed, seed is None or 0 <= seed < 2**63, "from 0 to 2^63 - 1")
    require("--drain-seconds", drain_seconds, drain_seconds >= 0, "at least 0")


def _check_key(api_key: str | None) -> None:
    """Raises ValueError if clients could not send the key; it stays out of the message."""
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise ValueError("--api-key: must be one or more visible ASCII characters")
