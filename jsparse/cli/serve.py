"""The command `jsparse serve`."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from typer import Option

from jsparse.cli.hosts import HostsOptions
from jsparse.cli.options import (
    ChatLoadingOptions,
    ExactOption,
    ModelOption,
    NumSpeculativeTokensOption,
    PolicyOption,
    PrefillOption,
    require,
    takes_model,
    takes_options,
    template_kwargs,
)
from jsparse.machine.extras import install


@dataclass(frozen=True)
class EngineFlags:
    """The options of the engine: keyword arguments of AsyncEngine."""

    max_model_len: Annotated[
        int | None,
        Option(help="Maximum tokens of prompt and output; the default is the model's on a GPU."),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option(help="Maximum decode batch size; the default is 64 on a GPU, else 8."),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Option(help="Fraction of the memory for the model, the KV cache and the policy's state."),
    ] = 0.9
    kv_offloading_size: Annotated[
        float, Option(help="GiB of host memory for cached prefixes and preempted sequences.")
    ] = 0.0
    enable_prefix_caching: Annotated[
        bool, Option(help="Whether requests reuse the KV cache of shared prefixes.")
    ] = True
    max_waiting: Annotated[
        int, Option(help="Maximum number of waiting requests; more get status 429.")
    ] = 1024
    max_stall_ms: Annotated[
        float, Option(help="Maximum milliseconds for which prefill may stall decoding.")
    ] = 200.0
    batch_invariant: Annotated[
        bool, Option(help="Whether results are bitwise the same in every batch; slower.")
    ] = False
    prefill: PrefillOption = "dense"
    exact: ExactOption = False
    num_speculative_tokens: NumSpeculativeTokensOption = None
    per_request: Annotated[
        list[str] | None,
        Option(
            metavar="<name>",
            help="Hyper-parameter of the policy that requests may set, such as p, or dense. "
            "Repeatable.",
        ),
    ] = None
    check_ranks: Annotated[
        bool,
        Option(
            "--check-ranks",
            help="Compare the tokens chosen on a model's GPUs after each program, and fail if they "
            "differ; slower.",
        ),
    ] = False

    def arguments(self) -> dict[str, Any]:
        return vars(self) | {"per_request": tuple(self.per_request or ())}


@dataclass(frozen=True)
class ServerFlags:
    """The options of the server around the engine."""

    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0: all addresses.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 picks a free one.")] = 8000
    data_parallel_size: Annotated[
        int,
        Option(
            help="Number of engines, each with its own process and GPUs; requests are routed by "
            "prefix and load."
        ),
    ] = 1
    api_key: Annotated[
        str | None,
        Option(envvar="JSPARSE_API_KEY", help="Key that clients must send.", show_envvar=True),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        Option(
            metavar="<name>",
            help="Name of the model for clients; the default is the model as given. Repeatable; "
            "responses have the first.",
        ),
    ] = None
    max_logprobs: Annotated[
        int,
        Option(help="Maximum top logprobs per token of a request; 0 starts faster."),
    ] = 20
    default_max_tokens: Annotated[
        int | None,
        Option(
            help="Maximum output tokens of chats that do not set a limit; the default is the "
            "available room."
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(help="Random seed of requests without one; the default is drawn at startup."),
    ] = None
    drain_seconds: Annotated[
        float, Option(help="Seconds for running requests to finish after SIGTERM.")
    ] = 30.0
    allowed_host: Annotated[
        list[str] | None,
        Option(
            metavar="<host>",
            help="Additional host name for browsers to reach a server that listens on loopback "
            "and has no key; *: any. Repeatable.",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        Option(
            metavar="<origin>",
            help="Origin, such as http://localhost:3000, whose pages may use the server from a "
            "browser; *: any. Repeatable.",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Option(
            metavar="<json>",
            help='Variables of the chat template, such as {"enable_thinking": false}, for requests '
            "that do not set them.",
        ),
    ] = None
    reasoning_parser: Annotated[
        Literal["qwen3", "deepseek_r1"] | None,
        Option(
            help="Return the text between <think> and </think> as reasoning_content. Both values "
            "do the same."
        ),
    ] = None
    tool_call_parser: Annotated[
        Literal["hermes", "llama3_json"] | None,
        Option(
            help="Format of the model's tool calls; Qwen's is hermes. The default is inferred from "
            "the chat template."
        ),
    ] = None
    special_tokens_in_messages: Annotated[
        bool,
        Option(
            help="Whether special tokens spelled in messages count: users could then write turns."
        ),
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(
            help="Minimum log level: info logs each request, and the engine's throughput every ten "
            "seconds; warning logs only problems."
        ),
    ] = "info"

    def check(self) -> None:
        """Raises ValueError if a number is out of range, or clients could not send the key."""
        most, tokens, seed = self.max_logprobs, self.default_max_tokens, self.seed
        require("--port", self.port, 0 <= self.port <= 65535, "from 0 to 65535")
        require("--max-logprobs", most, 0 <= most <= 20, "from 0 to 20")
        require("--default-max-tokens", tokens, tokens is None or tokens > 0, "at least 1")
        require("--seed", seed, seed is None or 0 <= seed < 2**63, "from 0 to 2^63 - 1")
        require("--drain-seconds", self.drain_seconds, self.drain_seconds >= 0, "at least 0")
        number = self.data_parallel_size
        require("--data-parallel-size", number, number >= 1, "at least 1")
        # the message must not contain the key
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError("--api-key: must be one or more visible ASCII characters")


@takes_model
@takes_options(HostsOptions, "hosts")
@takes_options(EngineFlags, "flags")
@takes_options(ServerFlags, "server")
@takes_options(ChatLoadingOptions, "loading")
def serve(
    loading: ChatLoadingOptions,
    server: ServerFlags,
    flags: EngineFlags,
    hosts: HostsOptions,
    model: ModelOption = "smollm2",
    policy: PolicyOption = "dense",
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Requests join and leave one running batch. On SIGTERM, running requests finish first.

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
    from jsparse.policies.sparse_prefill import with_prefill

    server.check()
    require("--max-waiting", flags.max_waiting, flags.max_waiting >= 0, "at least 0")
    size, engines = loading.tensor_parallel_size, server.data_parallel_size
    require("--tensor-parallel-size", size, size >= 1, "at least 1")
    allowed = origins.checked(server.allowed_origins or ())
    variables = template_kwargs(
        server.default_chat_template_kwargs, "--default-chat-template-kwargs"
    )
    if engines > 1:
        _leave_gpus_to_engines()
    with_prefill(resolve(policy), flags.prefill)  # report its errors before loading anything
    answers = hosts.join(size, engines)
    log.show(server.log_level)
    descriptors.raise_limit(2 if engines > 1 else 1)
    make_engine = partial(
        *(load_engine, model, policy),
        **vars(loading),
        **flags.arguments(),
        layer_stats="newest",
        # otherwise the first request for logprobs would compile them, and stall all others
        prepare="logprobs" if server.max_logprobs else True,
    )
    if not answers:
        make_engine()  # runs the commands of process 0 until that exits
        return
    listening = run.listen(server.host, server.port)
    address, at = listening.getsockname()[:2]

    def on_ready(about: tuple[str, str]) -> None:
        where = f"[{address}]" if ":" in address else address
        name, (run_by, what) = options.name, about
        by = f"{run_by} in {engines} processes" if engines > 1 else run_by
        if size > 1:
            by += f" on {size} devices{' each' * (engines > 1)}"
        print(f"jsparse serves {name} with {by} at http://{where}:{at}", flush=True)
        print(what, flush=True)
        print(f"A page to chat and to see what is read: http://{where}:{at}/", flush=True)

    names = run.own_names(address, server.host, server.allowed_host or ())
    name, *aliases = server.served_model_name or [model]
    options = Options(
        name,
        server.api_key,
        flags.max_waiting,
        max_logprobs=server.max_logprobs,
        default_max_tokens=server.default_max_tokens,
        hosts=None if server.api_key else names,
        origins=allowed,
        special_tokens=server.special_tokens_in_messages,
        template_kwargs=variables,
        splits_reasoning=server.reasoning_parser is not None,
        tool_call_parser=server.tool_call_parser,
        aliases=tuple(aliases),
        drain_seconds=server.drain_seconds,
    )
    if engines == 1:
        make = partial(make_engine, seed=server.seed)
        run.serve(options, make, listening, on_ready=lambda engine: on_ready(describe(engine)))
    else:
        first = server.seed
        seeds = [first if first is None else first + nth for nth in range(engines)]
        makers = [partial(make_engine, seed=each) for each in seeds]
        replicas.serve(options, makers, size, listening, on_ready=on_ready)


def _leave_gpus_to_engines() -> None:
    """Keeps this process from allocating GPU memory, as code of a user's policy might."""
    import jax

    jax.config.update("jax_platforms", "cpu")
