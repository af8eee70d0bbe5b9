"""`jsparse chat`: turns read from standard input, answers streamed, the conversation kept."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jsparse.cli.console import Bars, TextOutput, print_error, print_stats
from jsparse.cli.options import GenerationOptions, takes_generation_options

if TYPE_CHECKING:
    from jsparse.models.checkpoint import Params

Messages = list[dict[str, str]]


class Chat:
    """A conversation with a model. Every turn reads the whole of it anew."""

    def __init__(
        self, params: "Params", arguments: dict[str, Any], system: str | None, bars: Bars
    ) -> None:
        """Begins one.

        Args:
            params: the model; it must have a chat template.
            arguments: keyword arguments of `jsparse.generate`.
            system: the system message, or None.
            bars: where progress is shown.

        Raises:
            ValueError: the model has no chat template.
        """
        if params.tokenizer is None or params.tokenizer.chat_template is None:
            raise ValueError(f"model={params.name!r} has no chat template: use `jsparse generate`")
        self._params, self._arguments, self._bars = params, arguments, bars
        self._opening: Messages = (
            [{"role": "system", "content": system}] if system is not None else []
        )
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = list(self._opening)

    def answer(self, text: str) -> None:
        """Streams the answer to one more message. An interrupted answer counts as far as it came.

        Raises:
            ValueError: as `jsparse.generate`; the message is then forgotten.
        """
        from jsparse.generation import generate

        asked: Messages = [*self.messages, {"role": "user", "content": text}]
        output = TextOutput(self._bars)
        made = None
        try:
            with suppress(KeyboardInterrupt):
                made = generate(
                    self._params,
                    asked,
                    streamer=output,
                    on_progress=self._bars.prefill,
                    **self._arguments,
                )
        finally:
            self._bars.close()
        output.close()
        self.messages = [*asked, {"role": "assistant", "content": output.text}]
        if made is not None:
            print_stats(made)


@takes_generation_options
def chat(
    options: GenerationOptions,
    system: Annotated[str | None, Option(help="A system message to begin with.")] = None,
) -> None:
    """Talks with a chat model: a message a line, typed or piped in. /reset begins anew, /exit ends.

    Example: jsparse chat --system "Answer in one sentence." --temperature 0.7
    """
    bars = Bars()
    try:
        params = options.load(bars.load)
        run(Chat(params, options.arguments(), system, bars))
    finally:
        bars.close()


def run(chat: Chat) -> None:
    """Reads a message a line until the input ends or /exit; /reset begins anew."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  gives input() a history and editing keys
        print(
            "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C cuts an answer short", file=sys.stderr
        )
    while (line := _read_line(at_terminal)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                chat.reset()
            case text:
                try:
                    chat.answer(text)
                except ValueError as error:
                    if not at_terminal:
                        raise
                    print_error(error)


def _read_line(at_terminal: bool) -> str | None:
    """The next line, None at the end of the input."""
    if not at_terminal:
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None
