"""Defines the bodies of requests, and converts them to SamplingParams.

Names are OpenAI's or, if OpenAI has none, vLLM's.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from jsparse.models.chat_template import joined
from jsparse.runtime.sampling_params import MAX_BIASES, SamplingParams
from jsparse.server.body import RequestBody
from jsparse.server.errors import ApiError

# bounds on the engine's work for each token or each prompt
MAX_LOGPROBS = 20
MAX_PROMPTS, MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_KNOBS = 128, 16, 128, 1000, 64
MAX_MESSAGES, MAX_SALT_CHARS = 4096, 256
MAX_VARIABLES, MAX_EFFORT_CHARS = 64, 64
MAX_TOOLS, MAX_CALLS = 256, 256
MAX_ALLOWED = 2**18
# the fields of messages that templates get
IN_TEMPLATES = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id"}


def _prompt(given: Any) -> Any:
    """Checks that a prompt is text, ids, or a list of either."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise ValueError("must be text, token ids, or a list of either")
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return given
    if len(given) > MAX_PROMPTS:
        raise ValueError(f"must hold at most {MAX_PROMPTS} prompts")
    rows = [row for row in given if isinstance(row, list)]
    if kinds != {str} and (kinds != {list} or {type(i) for row in rows for i in row} - {int}):
        raise ValueError("must be text, token ids, or a list of either")
    return given


def _at_most(count: int) -> BeforeValidator:
    """Refuses objects with more than `count` entries before these are checked."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > count:
            raise ValueError(f"must have at most {count} entries")
        return given

    return BeforeValidator(check)


_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, _IDS, _TEXTS, {"type": "array", "items": _IDS}],
}


Prompt = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


Content = Annotated[
    str,
    BeforeValidator(joined),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS]}),
]


class JsonSchema(RequestBody):
    """The schema of a response format."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema must be given if type is 'json_schema', and only then")
        return self

    @property
    def structure(self) -> dict[str, Any] | None:
        """The same as vLLM's structured_outputs."""
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class StreamOptions(RequestBody):
    """The contents of a stream besides the completions."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(RequestBody):
    """The fields that both kinds of requests have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], _at_most(MAX_BIASES)] = Field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    stop: Stops = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = 0
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    priority: int = 0
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_ALLOWED)
    structured_outputs: Annotated[dict[str, Any], _at_most(MAX_KNOBS)] | None = None
    response_format: ResponseFormat | None = None
    bad_words: list[str] | None = None
    policy: Annotated[dict[str, bool | float], _at_most(MAX_KNOBS)] = Field(default_factory=dict)
    exact: bool | None = None
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # fields of OpenAI's services; without effect on a completion
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    @abstractmethod
    def likely(self) -> int | None:
        """The number of likely tokens to report, or None."""

    def check_likely(self, limit: int) -> None:
        """Raises ApiError if more than `limit` likely tokens are requested."""
        name = "top_logprobs" if "top_logprobs" in type(self).model_fields else "logprobs"
        for each, number in ((name, self.likely), ("prompt_logprobs", self.prompt_logprobs)):
            if (number or 0) > limit:
                rule = f"{each}={number}: must be at most {limit} on this server"
                raise ApiError(400, rule, param=each)

    @property
    @abstractmethod
    def max_new_tokens(self) -> int | None:
        """The maximum number of tokens of a completion; None: all that fit."""

    def sampling(self, max_tokens: int, temperature: float | None) -> SamplingParams:
        """Returns the options; `temperature` is the default."""
        given: dict[str, Any] = {name: getattr(self, name) for name in SAME}
        if given["temperature"] is None:
            given["temperature"] = temperature
        if self.response_format is not None and self.response_format.structure is not None:
            given["structured_outputs"] = self.response_format.structure
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=self.likely)

    @model_validator(mode="after")
    def _one_structure(self) -> "GenerationRequest":
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: must not be given with response_format")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_whole(self) -> "GenerationRequest":
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: must not be given with stream=true")
        return self

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def with_usage_so_far(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        options = self.stream_options or StreamOptions()
        return options.include_usage and options.continuous_usage_stats


# SamplingParams' fields that requests set under the same name
SAME = tuple(
    name
    for name in GenerationRequest.model_fields
    if name in SamplingParams.__dataclass_fields__ and name != "max_tokens"
)


class CompletionRequest(GenerationRequest):
    """A request to continue prompts."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def likely(self) -> int | None:
        return self.logprobs

    @property
    def max_new_tokens(self) -> int:
        # the engine generates at least one
        return 16 if self.max_tokens is None else max(1, self.max_tokens)

    def sampling(self, max_tokens: int, temperature: float | None) -> SamplingParams:
        made = super().sampling(max_tokens, temperature)
        if self.echo and self.logprobs is not None:
            wanted = max(self.logprobs, self.prompt_logprobs or 0)
            made = replace(made, prompt_logprobs=wanted)
        return made

    @model_validator(mode="after")
    def _nothing_but_the_prompt(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0: must be at least 1, or come with echo=true")
        return self


class ChatMessage(RequestBody):
    """A message of a chat. The role `tool` has the result of a call in an earlier message."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda given: "system" if given == "developer" else given),
    ]
    content: Content
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    name: str | None = None
    type: Literal["text"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_may_be_all(cls, given: Any) -> Any:
        """Lets a message have calls instead of a content."""
        if isinstance(given, dict) and given.get("tool_calls") and given.get("content") is None:
            return given | {"content": ""}
        return given

    @model_validator(mode="after")
    def _assistants_call(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"must be of the role 'assistant' to have tool_calls, not {self.role!r}"
            )
        return self


# a malformed element ends the check: a body may have a million of them
ChatMessages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody):
    """The choice of one tool."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")] | Annotated[NamedTool, Tag("tool")],
    Discriminator(lambda given: "tool" if isinstance(given, dict | NamedTool) else "word"),
]


class TemplateFields(RequestBody):
    """What a chat asks of the model's template, under vLLM's names."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], _at_most(MAX_VARIABLES)] = Field(
        default_factory=dict
    )
    reasoning_effort: Annotated[str, Field(max_length=MAX_EFFORT_CHARS)] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> list[dict[str, Any]]:
        """The tools of which it must call some."""
        tools = [tool for tool in self.tools or () if isinstance(tool.get("function"), dict)]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in tools if tool["function"].get("name") == name]
        return tools if self.tool_choice == "required" else []

    @model_validator(mode="after")
    def _choice_is_offered(self) -> "TemplateFields":
        if self.tool_choice not in ("auto", "none") and not self.required_tools:
            choice = self.tool_choice
            shown = choice if isinstance(choice, str) else choice.function.name
            raise ValueError(f"tool_choice={shown!r}: must be among tools")
        return self

    def chat(self, messages: list[ChatMessage], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns messages as a prompt; `defaults` are variables of the template."""
        variables = dict(defaults)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        # as for fields, null asks for nothing
        given = {name: x for name, x in self.chat_template_kwargs.items() if x is not None}
        return {
            "messages": [
                each.model_dump(
                    include=IN_TEMPLATES | ({"name"} if each.role == "tool" else set()),
                    exclude_none=True,
                )
                for each in messages
            ],
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": variables | given,
            "tools": self.offered,
        }


class ChatRequest(TemplateFields, GenerationRequest):
    """A request to reply to a chat."""

    messages: ChatMessages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs}: must have logprobs=true with it")
        return self


class TokenizeRequest(TemplateFields):
    """A request for the ids of either a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: either prompt or messages must be given, but not both")
        return self


class DetokenizeRequest(RequestBody):
    """A request for the text of ids."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(fail_fast=True)]
