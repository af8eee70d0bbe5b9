"""The command `jsparse chat`, which reads turns from standard input and streams the replies."""

import re
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jsparse.cli.console import Bars, TextOutput, print_error, print_note, print_stats
from jsparse.cli.options import (
    ChatLoadingOptions,
    GenerationOptions,
    TemplateOption,
    takes_model,
    takes_options,
    template_kwargs,
)

if TYPE_CHECKING:
    from jsparse.conversation import Conversation
    from jsparse.models.checkpoint import Params

COMMANDS = ("/help", "/reset", "/exit", "/quit")
HELP = "/reset starts over, /exit, /quit or Ctrl-D ends, Ctrl-C cuts an answer short"
Messages = list[dict[str, str]]


class Chat:
    """A conversation with a model that has a chat template.

    A further turn prefills at most the last reply and the new message. The whole conversation is
    prefilled again if the policy evicts tokens, the template rewrites earlier messages, or the
    cache has become too small.
    """

    def __init__(
        self,
        params: "Params",
        arguments: dict[str, Any],
        system: str | None,
        template: dict[str, Any],
        bars: Bars,
    ) -> None:
        """Starts a conversation; `arguments` are those of `jsparse.generate`.

        `template`: variables of the chat template.
        """
        if params.tokenizer is None or params.tokenizer.chat_template is None:
            raise ValueError(f"model={params.name!r} has no chat template: use `jsparse generate`")
        self._params, self._arguments, self._bars = params, arguments, bars
        self._template = template
        self._opening: Messages = (
            [{"role": "system", "content": system}] if system is not None else []
        )
        self.messages = list(self._opening)
        self._conversation: Conversation | None = None
        self._noted = False

    def reset(self) -> None:
        """Removes all messages except the system message."""
        self.messages, self._conversation = list(self._opening), None

    def answer(self, text: str) -> None:
        """Streams the reply to one more message; an interrupted reply stays in the conversation."""
        from jsparse.conversation import Conversation

        if self._conversation is None:
            self._conversation = Conversation(self._params, **self._arguments)
            if self._conversation.reads_anew and not self._noted:
                print_note(self._conversation.reads_anew)
                self._noted = True
        messages: Messages = [*self.messages, {"role": "user", "content": text}]
        output = TextOutput(self._bars)
        generation = None
        try:
            with suppress(KeyboardInterrupt):
                generation = self._conversation.answer(
                    {"messages": messages, "chat_template_kwargs": self._template},
                    streamer=output,
                    on_progress=self._bars.prefill,
                )
        finally:
            self._bars.close()
        output.close()
        self.messages = [*messages, {"role": "assistant", "content": output.text}]
        if generation is not None:
            print_stats(generation)


@takes_model
@takes_options(ChatLoadingOptions, "loading")
@takes_options(GenerationOptions)
def chat(
    options: GenerationOptions,
    loading: ChatLoadingOptions,
    system: Annotated[
        str | None, Option(help="System message that opens the conversation.")
    ] = None,
    chat_template_kwargs: TemplateOption = None,
) -> None:
    """Chat with a model, one message per line, typed or piped in.

    /reset starts over, /exit or /quit ends the chat, /help lists these.

    Example: jsparse chat --system "Answer in one sentence." --temperature 0.7
    """
    template = template_kwargs(chat_template_kwargs)
    with closing(Bars()) as bars:
        params = options.load(loading, bars.load)
        run(Chat(params, options.arguments(), system, template, bars))


def run(chat: Chat) -> None:
    """Reads one message per line until /exit or the end of the input."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  gives input() a history and editing keys
        print(HELP, file=sys.stderr)
    while (line := _read_line(at_terminal)) is not None:
        text = line.strip()
        try:
            match _command(line):
                case "/exit" | "/quit":
                    return
                case "/reset":
                    chat.reset()
                case "/help":
                    print(HELP, file=sys.stderr)
                case None if text:
                    chat.answer(text)
                case None:
                    continue
                case unknown:
                    raise ValueError(
                        f"{unknown}: must be one of {', '.join(COMMANDS)}; a message may start "
                        "with a space and a slash"
                    )
        except ValueError as error:
            if not at_terminal:
                raise
            print_error(error)


def _command(line: str) -> str | None:
    """Returns the command at the start of a line; paths such as /etc/hosts are not commands."""
    match = re.match(r"/[A-Za-z]*(?=\s|$)", line)
    return match and match[0]


def _read_line(at_terminal: bool) -> str | None:
    """Returns the next line, or None at the end of the input."""
    if not at_terminal:
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None
