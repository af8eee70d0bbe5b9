"""The command `jsparse generate`."""

import dataclasses
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jsparse.cli.console import Bars, TextOutput, print_stats
from jsparse.cli.options import (
    ChatLoadingOptions,
    GenerationOptions,
    JsonOption,
    PromptArgument,
    PromptFileOption,
    TemplateOption,
    read_prompt,
    takes_options,
    template_kwargs,
)
from jsparse.text.short_names import short_name

if TYPE_CHECKING:
    from jsparse.models.checkpoint import Params
    from jsparse.runtime.host_reader import Generation


@takes_options(ChatLoadingOptions, "loading")
@takes_options(GenerationOptions)
def generate(
    options: GenerationOptions,
    loading: ChatLoadingOptions,
    prompt: PromptArgument = None,
    file: PromptFileOption = None,
    chat: Annotated[
        bool, Option("--chat", help="Send the prompt as a user message, for a chat model.")
    ] = False,
    chat_template_kwargs: TemplateOption = None,
    logprobs: Annotated[
        bool, Option("--logprobs", help="Include each token's log-probability; needs --json.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt.

    The final line break of text from a file or standard input is dropped.

    Example: jsparse generate "Gravity is" --policy "streaming(sink=4, recent=512)"
    """
    if logprobs and not as_json:
        raise ValueError("--logprobs needs --json, which prints them")
    of_chats = {
        "--chat-template": loading.chat_template,
        "--chat-template-kwargs": chat_template_kwargs,
    }
    for name, value in of_chats.items():
        if value is not None and not chat:
            raise ValueError(f"{name} needs --chat")
    template = template_kwargs(chat_template_kwargs)
    text = read_prompt(prompt, file)
    request: Any = text
    if chat:
        messages = [{"role": "user", "content": text}]
        request = {"messages": messages, "chat_template_kwargs": template}
    with closing(Bars()) as bars:
        params = options.load(loading, bars.load)
        if as_json:
            _generate_json(params, request, options, logprobs, bars)
        else:
            _generate_text(params, request, text, options, bars)


def _generate_text(
    params: "Params", prompt: Any, shown: str, options: GenerationOptions, bars: Bars
) -> None:
    """Streams the text; an interrupt ends it."""
    from jsparse.generation import generate

    output = TextOutput(bars, shown)
    try:
        generation = generate(
            params, prompt, streamer=output, on_progress=bars.prefill, **options.arguments()
        )
    except KeyboardInterrupt:
        output.close()
        raise
    output.close()
    print_stats(generation)


def _generate_json(
    params: "Params", prompt: Any, options: GenerationOptions, logprobs: bool, bars: Bars
) -> None:
    """Prints the result as JSON; an interrupted run gives the text so far."""
    from jsparse.generation import generate

    pieces: list[str] = []
    generation = None
    try:
        generation = generate(
            params,
            prompt,
            streamer=pieces.append,
            on_progress=bars.generate,
            logprobs=logprobs,
            **options.arguments(),
        )
    finally:
        bars.close()
        if generation is not None or isinstance(sys.exception(), KeyboardInterrupt):
            # in ASCII, for any encoding of standard output
            print(json.dumps(_result(generation, "".join(pieces)) | _origin(params, options)))


def _result(generation: "Generation | None", text: str) -> dict[str, Any]:
    if generation is None:
        return {"text": text, "finish_reason": "interrupted"}
    fields = dataclasses.asdict(generation)
    fields["stats"]["policy"] = short_name(generation.stats.policy)
    return {name: value for name, value in fields.items() if value is not None}


def _origin(params: "Params", options: GenerationOptions) -> dict[str, Any]:
    """Returns the options that reproduce the text."""
    import jax

    from jsparse import __version__
    from jsparse.policies.sparse_prefill import with_prefill

    return {
        "model": options.model,
        "dtype": params.types,
        "policy": short_name(with_prefill(options.policy, options.prefill)),
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }
