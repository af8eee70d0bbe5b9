"""The command `jsparse`: generate, chat, eval, info, policies, calibrate-channels, train-gates.

jax and what needs it are imported inside the commands, so that help and mistakes in options come at once.
"""

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option
from typer.core import TyperGroup

from jsparse.console import Bars, TextOutput, print_error, print_stats, quiet_jax
from jsparse.evaluation.command import evaluate
from jsparse.generation_options import DtypeName, GenerationOptions, takes_generation_options
from jsparse.train.run import train_gates

if TYPE_CHECKING:
    from jsparse.models.checkpoint import Params
    from jsparse.output import Generation


class _Commands(TyperGroup):
    """Turns what the library refuses into one line on standard error; other exceptions keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # typer ends quietly then
            raise
        except (ValueError, OSError) as error:
            print_error(error)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def main() -> None:
    """Runs the command."""
    quiet_jax()
    app(prog_name="jsparse")


def _print_version(wanted: bool) -> None:
    if wanted:
        from jsparse import __version__

        print(f"jsparse {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sparse-attention decoding of long contexts for Llama and Qwen models."""


@app.command()
@takes_generation_options
def generate(
    options: GenerationOptions,
    prompt: Annotated[str | None, Argument(help="The text to continue; - reads it from standard input.")] = None,
    file: Annotated[Path | None, Option(help="Read the prompt from this file, of UTF-8 text.")] = None,
    chat: Annotated[bool, Option("--chat", help="Put the prompt as a user's message to a chat model.")] = False,
    logprobs: Annotated[bool, Option("--logprobs", help="With --json: each token's log-probability.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continues a prompt. Of text that is read from a file or standard input, a last line break is left out.

    Example: jsparse generate "Gravity is" --policy "streaming(sink=4, recent=512)"
    """
    if logprobs and not as_json:
        raise ValueError("--logprobs needs --json, which prints them")
    text = _read_prompt(prompt, file)
    bars = Bars()
    try:
        params = options.load(bars.load)
        wanted = [{"role": "user", "content": text}] if chat else text
        if as_json:
            _generate_json(params, wanted, options, logprobs, bars)
        else:
            _generate_text(params, wanted, text, options, bars)
    finally:
        bars.close()


@app.command("chat")
@takes_generation_options
def chat_command(
    options: GenerationOptions, system: Annotated[str | None, Option(help="A system message to begin with.")] = None
) -> None:
    """Talks with a chat model: a message a line, typed or piped in. /reset begins anew, /exit ends.

    Example: jsparse chat --system "Answer in one sentence." --temperature 0.7
    """
    from jsparse.chat import Chat, run

    bars = Bars()
    try:
        params = options.load(bars.load)
        run(Chat(params, options.arguments(), system, bars))
    finally:
        bars.close()


@app.command()
def info(
    model: Annotated[str, Argument(help="smollm2, a folder, a .gguf file, or a Hub id such as org/name.")],
    dtype: Annotated[DtypeName | None, Option(help="The default is bfloat16 on a GPU, float32 elsewhere.")] = None,
    policy: Annotated[str, Option(help="Count what it keeps beside the cache; see `jsparse policies`.")] = "dense",
    context: Annotated[int | None, Option(help="Tell how many prompts of so many tokens fit.")] = None,
    revision: Annotated[str | None, Option(help="A branch, tag or commit of a Hub id.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Tells a model's sizes, what a policy keeps beside the cache, and how much context fits in the free memory.

    Example: jsparse info smollm2 --context 4096 --policy "twilight(quest(budget=1024), p=0.95)"
    """
    import jax

    from jsparse import model_info

    chosen = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    described = model_info.describe(model, dtype=chosen, policy=policy, context=context, revision=revision)
    if as_json:
        print(json.dumps(described))
        return
    table = Table(title=model, title_justify="left", show_header=False, box=None)
    for name, value in model_info.rows(described):
        table.add_row(name, value)
    Console(highlight=False).print(table)


@app.command()
def policies() -> None:
    """Lists what --policy can name, with arguments and their defaults.

    Example: jsparse generate "Gravity is" --policy "keep(oracle_top_k(budget=256), sink=4, recent=64)"
    """
    from jsparse.policies import POLICIES

    table = Table("policy", "what it does")
    for name, build in POLICIES.items():
        parameters = inspect.signature(build).parameters.values()
        shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
        summary = (inspect.getdoc(build) or "").partition("\n\n")[0].replace("\n", " ")
        table.add_row(f"{name}({shown})" if shown else name, summary)
    Console(highlight=False).print(table)


app.command("eval")(evaluate)
app.command("train-gates")(train_gates)


@app.command()
def calibrate_channels(
    text: Annotated[Path, Option(help="Read this file, of UTF-8 text such as the model will see.")],
    model: Annotated[
        str, Option("--model", "-m", help="smollm2, a folder, a .gguf file, or a Hub id such as org/name.")
    ] = "smollm2",
    out: Annotated[Path, Option(help="Write the ranking here, over what is there.")] = Path(
        "double_sparsity.safetensors"
    ),
    tokens: Annotated[int, Option(min=1, help="Read no more tokens of the text.")] = 2048,
    dtype: Annotated[DtypeName | None, Option(help="The default is bfloat16 on a GPU, float32 elsewhere.")] = None,
    revision: Annotated[str | None, Option(help="A branch, tag or commit of a Hub id.")] = None,
) -> None:
    """Ranks a model's channels for the policy double_sparsity, and prints the expression that uses them.

    Example: jsparse calibrate-channels --text book.txt --out heavy.safetensors
    """
    from jsparse import channel_calibration, prompts
    from jsparse.models.checkpoint import load
    from jsparse.policies import channel_ranking

    read, bars = _read_text(text, "--text"), Bars()
    if not read.strip():
        raise ValueError(f"--text {str(text)!r}: must hold some text")
    try:
        params = load(model, dtype=dtype, revision=revision, on_progress=bars.load)
        ids = prompts.encode(params, read)[0][0][:tokens]
        ranking = channel_calibration.calibrate_channels(params, ids, on_progress=bars.prefill)
    finally:
        bars.close()
    channel_ranking.save(ranking, out)
    print(f"double_sparsity(calibration={str(out)!r})")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt, from exactly one of its sources."""
    if (prompt is None) == (file is None):
        given = "both were given" if file else "none was given"
        raise ValueError(f"PROMPT or --file: must give exactly one of them (- reads standard input), {given}")
    if prompt is not None and prompt != "-":
        return prompt
    return _read_text(file, "--file").removesuffix("\n")


def _read_text(file: Path | None, option: str) -> str:
    """The text of the file that an option names, or of standard input."""
    try:
        return sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file or 'standard input'} is not UTF-8 text: {error.reason} at {error.start}") from None
    except OSError as error:
        raise ValueError(f"{option} {str(file)!r} cannot be read: {error.strerror}") from None


def _generate_text(params: "Params", prompt: Any, shown: str, options: GenerationOptions, bars: Bars) -> None:
    """Streams the text, as far as it comes."""
    from jsparse.generation import generate

    output = TextOutput(bars, shown)
    try:
        made = generate(params, prompt, streamer=output, on_progress=bars.prefill, **options.arguments())
    except KeyboardInterrupt:
        output.close()
        raise
    output.close()
    print_stats(made)


def _generate_json(params: "Params", prompt: Any, options: GenerationOptions, logprobs: bool, bars: Bars) -> None:
    """Prints the result; of an interrupted run the text so far."""
    from jsparse.generation import generate

    pieces: list[str] = []
    made = None
    try:
        made = generate(
            params,
            prompt,
            streamer=pieces.append,
            on_progress=bars.generate,
            logprobs=logprobs,
            **options.arguments(),
        )
    finally:
        bars.close()
        if made is not None or isinstance(sys.exception(), KeyboardInterrupt):
            print(json.dumps(_result(made, "".join(pieces)) | _origin(params, options), ensure_ascii=False))


def _result(made: "Generation | None", text: str) -> dict[str, Any]:
    if made is None:
        return {"text": text, "finish_reason": "interrupted"}
    fields = dataclasses.asdict(made)
    return {name: value for name, value in fields.items() if value is not None}


def _origin(params: "Params", options: GenerationOptions) -> dict[str, Any]:
    """What made the text: enough to make it again."""
    import jax

    from jsparse import __version__
    from jsparse.policies import parse

    return {
        "model": options.model,
        "dtype": str(params.dtype),
        "policy": parse(options.policy).name,
        "versions": {"jsparse": __version__, "jax": jax.__version__},
    }
