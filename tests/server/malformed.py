"""Lists bodies that are refused, each with its path, the field and words of the message."""

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "w1"}]


def part(kind, **more):
    return [{"role": "user", "content": [{"type": kind, **more}]}]


# by the schema alone
MALFORMED = [
    (COMPLETIONS, {}, "prompt", "must be given"),
    (COMPLETIONS, {"prompt": None}, "prompt", "must be given"),
    (COMPLETIONS, {"prompt": []}, "prompt", "must be text, token ids, or a list"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "prompt=3: must be text"),
    (COMPLETIONS, {"prompt": [1, "w1"]}, "prompt", "must be text"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "must be text"),
    (COMPLETIONS, {"prompt": [[1.5]]}, "prompt", "must be text"),
    (COMPLETIONS, {"prompt": ["w1"] * 129}, "prompt", "at most 128 prompts"),
    (COMPLETIONS, {"prompt": "\ud800"}, "", "Invalid JSON"),
    (COMPLETIONS, {"prompt": "w1", "max_tokens": 0}, "max_tokens", "max_tokens=0: "),
    (COMPLETIONS, {"prompt": "w1", "max_tokens": "9"}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": "w1", "temperature": -1}, "temperature", "at least 0"),
    (COMPLETIONS, {"prompt": "w1", "temperature": "hot"}, "temperature", "temperature='hot'"),
    (COMPLETIONS, {"prompt": "w1", "top_p": 0}, "top_p", "above 0 and at most 1"),
    (COMPLETIONS, {"prompt": "w1", "top_k": -2}, "top_k", "at least 0"),
    (COMPLETIONS, {"prompt": "w1", "best_of": 2}, "best_of", "use n"),
    (COMPLETIONS, {"prompt": "w1", "best_of": True}, "best_of", "use n"),
    (COMPLETIONS, {"prompt": "w1", "n": 16, "x" * 999: 1}, "x" * 300 + "…", "xxx"),
    (COMPLETIONS, {"prompt": "w1", "min_p": 2}, "min_p", "from 0 to 1"),
    (COMPLETIONS, {"prompt": "w1", "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    (COMPLETIONS, {"prompt": "w1", "presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    (COMPLETIONS, {"prompt": "w1", "frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    (COMPLETIONS, {"prompt": "w1", "n": 17}, "n", "from 1 to 16"),
    (COMPLETIONS, {"prompt": "w1", "n": True}, "n", "n=True"),
    (COMPLETIONS, {"prompt": "w1", "seed": -1}, "seed", "from 0 to"),
    (COMPLETIONS, {"prompt": "w1", "stop": [""]}, "stop[0]", "at least 1 character"),
    (COMPLETIONS, {"prompt": "w1", "stop": ["a"] * 17}, "stop", "at most 16"),
    (COMPLETIONS, {"prompt": "w1", "stop": "a" * 129}, "stop[0]", "at most 128"),
    (COMPLETIONS, {"prompt": "w1", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (COMPLETIONS, {"prompt": "w1", "logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    (COMPLETIONS, {"prompt": "w1", "min_tokens": 20}, "min_tokens", "from 0 to max_tokens"),
    (COMPLETIONS, {"prompt": "w1", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    (COMPLETIONS, {"prompt": "w1", "echo": True, "logprobs": 1}, "echo", "must be false"),
    (COMPLETIONS, {"prompt": "w1", "stream": "yes"}, "stream", "stream='yes'"),
    (COMPLETIONS, {"prompt": "w1", "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    (COMPLETIONS, {"prompt": "w1", "suffix": "x"}, "suffix", "never filled in"),
    (COMPLETIONS, {"prompt": "w1", "frobnicate": 1}, "frobnicate", "unknown field"),
    (COMPLETIONS, [1], "", "object"),
    (CHATS, {}, "messages", "must be given"),
    (CHATS, {"messages": []}, "messages", "at least 1"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "must be given"),
    (CHATS, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
    (CHATS, {"messages": part("image_url", image_url={})}, "messages[0].content", "images"),
    (CHATS, {"messages": part("input_audio")}, "messages[0].content", "audio"),
    (CHATS, {"messages": HI, "tools": [{}]}, "tools", "tools are not supported"),
    (CHATS, {"messages": HI, "tool_choice": "auto"}, "tool_choice", "not supported"),
    (CHATS, {"messages": HI, "functions": []}, "functions", "not supported"),
    (CHATS, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "not"),
    (CHATS, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template", "never run"),
    (CHATS, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "must have logprobs=true"),
    (CHATS, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHATS, {"messages": HI, "prompt": "w1"}, "prompt", "unknown field"),
    (CHATS, {"messages": HI * 4097}, "messages", "at most 4096 items"),
    ("/tokenize", {}, "prompt", "must be given"),
    ("/tokenize", {"prompt": "w1", "messages": HI}, "prompt", "not both"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    ("/detokenize", {"tokens": "w1"}, "tokens", "tokens='w1'"),
]
# by what is known of the model and its engine
UNFIT = [
    (COMPLETIONS, {"prompt": ""}, "prompt", "is empty"),
    (COMPLETIONS, {"prompt": [300]}, "prompt", "token id 300: must be from 0 to 299"),
    (COMPLETIONS, {"prompt": [[-1]]}, "prompt", "token id -1"),
    (COMPLETIONS, {"prompt": [1] * 90}, "prompt", "must be at most max_model_len=96"),
    (COMPLETIONS, {"prompt": "w1", "max_tokens": 10**30}, "prompt", "must be at most"),
    (COMPLETIONS, {"prompt": "w1", "stop_token_ids": [300]}, "stop_token_ids", "0 to 299"),
    (COMPLETIONS, {"prompt": "w1", "policy": {"q": 1}}, "policy", "'q'"),
    (COMPLETIONS, {"prompt": "w1", "policy": {"p": 2}}, "policy", "p=2.0: must be"),
    (CHATS, {"messages": HI * 95, "max_tokens": 9}, "messages", "max_model_len=96"),
    (CHATS, {"messages": HI * 96}, "messages", "max_model_len=96"),
]
