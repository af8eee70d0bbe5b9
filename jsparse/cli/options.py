"""Options shared by several commands."""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from jsparse.models.checkpoint import Params

DtypeName = Literal["float32", "bfloat16", "float16"]
OnBytes = Callable[[int, int], None]

# options by which every command names its model; see also `takes_model`
MODEL_HELP = "Model to load: smollm2, a folder, a .gguf file, or a Hub id such as org/name."
ModelOption = Annotated[str, Option("--model", "-m", help=MODEL_HELP)]
DtypeOption = Annotated[
    DtypeName | None,
    Option(help="Type of the weights; the default is bfloat16 on a GPU, float32 elsewhere."),
]
WeightsOption = Annotated[
    Literal["auto", "stored", "plain", "q8_0", "bf16"] | None,
    Option(
        help="auto, the default, keeps a file's 4- to 8-bit matrices where kernels read them, "
        "stored on any device; plain widens them to the dtype; q8_0 stores all in 8-bit blocks; "
        "bf16 is plain in bfloat16."
    ),
]
KVCacheDtypeOption = Annotated[
    str,
    Option(
        metavar="<auto|int8>",
        help="Type of K and V: int8 takes half the memory of bfloat16; auto is the model's type.",
    ),
]
RevisionOption = Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")]
TemplateOption = Annotated[
    str | None,
    Option(
        metavar="<json>",
        help='Variables of the chat template, such as {"enable_thinking": false}.',
    ),
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
PromptArgument = Annotated[
    str | None, Argument(help="Text to continue; - reads it from standard input.")
]
PromptFileOption = Annotated[
    Path | None, Option("--file", help="UTF-8 text file to read the prompt from.")
]
PageSizeOption = Annotated[int, Option(help="Tokens per page of the cache: 8, 16, 32 or 64.")]


@dataclass(frozen=True)
class LoadingOptions:
    """How to load the model: keyword arguments of `jsparse.load`."""

    dtype: DtypeOption = None
    weights: WeightsOption = None
    revision: RevisionOption = None
    tensor_parallel_size: Annotated[
        int,
        Option(help="Number of GPUs for tensor parallelism; each has some of the heads."),
    ] = 1
    kv_cache_dtype: KVCacheDtypeOption = "auto"

    def load(self, model: str, on_progress: OnBytes | None = None) -> "Params":
        from jsparse.models.checkpoint import load

        return load(model, on_progress=on_progress, **vars(self))


@dataclass(frozen=True)
class ChatLoadingOptions(LoadingOptions):
    """How to load a model for chats."""

    chat_template: Annotated[
        Path | None,
        Option(help="Jinja file of a chat template, instead of the model's own."),
    ] = None


def complete_policy(incomplete: str) -> list[str]:
    """Returns the names of policies with this prefix, for shell completion."""
    from jsparse.policies import POLICIES

    return [name for name in POLICIES if name.startswith(incomplete)]


POLICY_FORMS = (
    "an expression such as 'streaming(sink=4, recent=512)' (see `jsparse policies`), or your own "
    "as path.py:function or module:function."
)
POLICY_HELP = f"Policy that chooses the tokens each step reads: {POLICY_FORMS}"
PolicyOption = Annotated[
    str, Option(metavar="<policy>", autocompletion=complete_policy, help=POLICY_HELP)
]
PrefillOption = Annotated[
    str,
    Option(
        metavar="<method>",
        help="How prompts attend to themselves: dense, or sparsely by 'xattention(threshold=0.9)', "
        "'vertical_slash(sink=128, recent=1024)' or 'streaming(sink=128, recent=4096)'; 'auto': by "
        "the first of these, from where it saves time.",
    ),
]
# for commands that compare policies with dense attention
PolicyListOption = Annotated[
    list[str] | None,
    Option(
        metavar="<policy>",
        autocompletion=complete_policy,
        help=f"Policy to compare with dense attention: {POLICY_FORMS} Repeatable.",
    ),
]
ExactOption = Annotated[
    bool,
    Option(
        "--exact",
        help="Verify the policy's drafts with dense attention: the text is dense attention's own.",
    ),
]
NumSpeculativeTokensOption = Annotated[
    int | None,
    Option(
        help="With --exact, the tokens drafted per verification round. By default it adapts to "
        "the acceptance rate and the time of rounds."
    ),
]


@dataclass(frozen=True)
class GenerationOptions:
    """The model to load and the keyword arguments of `jsparse.generate`."""

    model: ModelOption = "smollm2"
    policy: PolicyOption = "dense"
    prefill: PrefillOption = "dense"
    exact: ExactOption = False
    num_speculative_tokens: NumSpeculativeTokensOption = None
    max_new_tokens: Annotated[int, Option(help="Maximum number of tokens to generate.")] = 128
    temperature: Annotated[
        float | None,
        Option(help="Sampling temperature; 0 is greedy. The default is the model's own, else 0."),
    ] = None
    top_k: Annotated[int | None, Option(help="Sample from the k most likely tokens; 0: off.")] = (
        None
    )
    top_p: Annotated[
        float | None,
        Option(help="Sample from the most likely tokens with a total probability of p; 1: off."),
    ] = None
    min_p: Annotated[
        float | None,
        Option(help="Drop tokens less likely than min-p times the most likely one; 0: off."),
    ] = None
    repetition_penalty: Annotated[
        float | None, Option(help="Make tokens that occurred before less likely; 1: off.")
    ] = None
    seed: Annotated[int, Option(help="Random seed.")] = 0
    stop: Annotated[
        list[str] | None, Option(metavar="<str>", help="String that ends the text. Repeatable.")
    ] = None
    eos_token_id: Annotated[
        list[int] | None,
        Option(
            metavar="<int>",
            help="Token id that ends the text, instead of the model's own. Repeatable.",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        Option(help="Capacity of the cache in tokens; the default fits prompt and new tokens."),
    ] = None
    page_size: PageSizeOption = 16

    def load(self, loading: LoadingOptions, on_progress: OnBytes) -> "Params":
        """Loads the model, after parsing the policy so that its errors come first."""
        from jsparse.policies.own_code import resolve
        from jsparse.policies.sparse_prefill import with_prefill

        with_prefill(resolve(self.policy), self.prefill)
        return loading.load(self.model, on_progress)

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `jsparse.generate`."""
        given = {name: value for name, value in vars(self).items() if name != "model"}
        return given | {"stop": self.stop or (), "eos_token_id": self.eos_token_id or None}


def template_kwargs(given: str | None, flag: str = "--chat-template-kwargs") -> dict[str, Any]:
    """Returns the variables of the chat template that a flag gives as JSON; none without it."""
    if given is None:
        return {}
    with suppress(ValueError):
        if isinstance(variables := json.loads(given), dict):
            return variables
    raise ValueError(f"{flag} {given}: must be a JSON object")


def takes_options(
    kind: type[Any], name: str = "options"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's parameter `name` by one per field of the dataclass `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(kind)
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != name]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            made = kind(**{p.name: given.pop(p.name) for p in shared})
            command(**{name: made}, **given)

        return _with_parameters(wrapper, [*own, *shared])

    return decorated


def require(option: str, value: object, holds: bool, rule: str) -> None:
    """Raises ValueError unless a rule holds for an option's value."""
    if not holds:
        raise ValueError(f"{option} {value}".rstrip() + f": must be {rule}")


def require_writable(option: str, file: Path | None) -> None:
    """Raises ValueError unless a file that will be written late can be; None: it is not wanted."""
    if file is not None:
        require(option, repr(str(file)), file.absolute().parent.is_dir(), "in an existing folder")
        require(option, repr(str(file)), not file.is_dir(), "a file, not a folder")


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Allows a command to take the model as its first argument or by its option --model."""
    own = inspect.signature(command).parameters
    default = own["model"].default
    [option] = own["model"].annotation.__metadata__
    help = option.help if default is None else f"{option.help} The default is {default}."
    first = own["model"].replace(
        default=None, annotation=Annotated[str | None, Argument(help=help, show_default=False)]
    )
    named = own["model"].replace(
        name="named_model",
        default=None,
        annotation=Annotated[
            str | None, Option("--model", "-m", help="The same, given as an option.")
        ],
    )

    @functools.wraps(command)
    def wrapper(*, model: str | None = None, named_model: str | None = None, **given: Any) -> None:
        if None not in (model, named_model) and model != named_model:
            raise ValueError(
                f"--model {named_model!r}: must not differ from the argument, {model!r}; one is "
                "enough"
            )
        command(model=model or named_model or default, **given)

    others = [parameter for name, parameter in own.items() if name != "model"]
    return _with_parameters(wrapper, [first, named, *others])


def _with_parameters(
    wrapper: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Sets the parameters of a command that typer sees; all of them have names."""
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__dict__["__signature__"] = inspect.Signature(named)
    wrapper.__annotations__ = {p.name: p.annotation for p in named}
    return wrapper


class _PlainFlags:
    """A mixin that hides the type of options without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command that hides the type of its flags."""


class CommandGroup(_PlainFlags, TyperGroup):
    """A group of such commands."""


def whole_numbers(name: str, text: str) -> list[int]:
    """Returns the numbers of an option with several, separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name}={text!r}: must be whole numbers with commas between them"
        ) from None


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Returns the prompt, which must come from exactly one source."""
    if (prompt is None) == (file is None):
        given = "both were given" if file else "none was given"
        raise ValueError(
            f"PROMPT or --file: must give exactly one of them (- reads standard input), {given}"
        )
    if prompt is not None and prompt != "-":
        return prompt
    return read_text(file, "--file").removesuffix("\n")


def read_text(file: Path | None, option: str) -> str:
    """Returns the text of an option's file, or of standard input."""
    try:
        return sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file or 'standard input'} is not UTF-8 text: {error.reason} at {error.start}"
        ) from None
    except OSError as error:
        raise ValueError(f"{option} {str(file)!r} cannot be read: {error.strerror}") from None
