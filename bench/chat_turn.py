"""How long does the second turn of a chat over a long document take?

SmolLM2, a document of about 7000 tokens out of the text of `jsparse eval`, a question, an answer of
32 tokens, a second question, an answer of 32 tokens, greedy, a cache of 8192 tokens. The second
turn is timed in two ways:

    whole         jsparse.generate reads the whole conversation, as every turn did before there
                  were conversations
    conversation  Conversation.answer reads on from the end of the first prompt

Both must give the same tokens; where they do not, the script ends with an error. Each policy runs
in its own process. A turn over another document of the same length, which also compiles, precedes
the timed turns, each of which is over a document of its own.

    python -m bench.chat_turn --json build/chat_turn.json
"""

import json
import time
from typing import Any

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import run_child, spread, write_report

DOCUMENT_TOKENS, NEW_TOKENS, RUNS = 7000, 32, 3
QUESTIONS = (
    "What is this passage about? Answer in a few sentences.",
    "Thank you. Which persons, places and works does the passage name, and what does it say of "
    "each of them? List the most important of them first, with one sentence for each.",
)


def first_turn(document: str) -> list[dict[str, str]]:
    """Returns the messages of the first turn."""
    return [{"role": "user", "content": f"{document}\n\n{QUESTIONS[0]}"}]


def second_turn(messages: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    """Returns the messages of the second turn."""
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": QUESTIONS[1]},
    ]


class Turn:
    """Times one turn, and counts the tokens that it reads.

    Attributes:
        seconds: the time from the call to the last token.
        tokens_read: the tokens that were read as a prompt.
        new_ids: the answer.
    """

    def __init__(self, answer: Any) -> None:
        """Runs a turn: `answer` takes `on_progress` and returns a Generation."""
        self.tokens_read = 0
        began = time.perf_counter()
        out = answer(on_progress=self._count)
        self.seconds = time.perf_counter() - began
        self.new_ids, self.text = out.token_ids, out.text

    def _count(self, phase: str, done: int, total: int) -> None:
        if phase == "prefill":
            self.tokens_read = total


def turns(params: Any, policy: str, document: str, new_tokens: int) -> dict[str, Turn]:
    """Runs both turns over a document, the second in two ways.

    Raises:
        ValueError: these do not give the same tokens.
    """
    from functools import partial

    import jsparse

    options: Any = {
        "policy": policy,
        "max_new_tokens": new_tokens,
        "temperature": 0.0,
        "eos_token_id": [],
        "max_length": params.config.max_position_embeddings,
    }
    chat = jsparse.Conversation(params, **options)
    asked = first_turn(document)
    first = Turn(partial(chat.answer, asked))
    asked = second_turn(asked, first.text)
    conversation = Turn(partial(chat.answer, asked))
    del chat  # frees its cache
    whole = Turn(partial(jsparse.generate, params, asked, **options))
    if conversation.new_ids != whole.new_ids:
        raise ValueError(
            f"policy={policy}: a conversation gave {conversation.new_ids}, must give "
            f"{whole.new_ids} as the whole does"
        )
    return {"first": first, "whole": whole, "conversation": conversation}


def measure(model: str, policy: str, tokens: int, new_tokens: int, runs: int) -> dict[str, Any]:
    """Measures one policy in this process; returns its row, ready for JSON.

    Raises:
        ValueError: the text is too short for these documents.
    """
    import jsparse
    from bench.lib.text import text_tokens

    params = jsparse.load(model)
    text = text_tokens(params)
    if tokens * (runs + 1) > len(text):
        raise ValueError(
            f"runs={runs}: must leave {tokens} of the {len(text)} tokens of the text for each run "
            "and the warm-up"
        )
    assert params.tokenizer is not None
    documents = [
        params.tokenizer.decode(text[nth * tokens : (nth + 1) * tokens]) for nth in range(runs + 1)
    ]
    done = [turns(params, policy, document, new_tokens) for document in documents][1:]
    row: dict[str, Any] = {"policy": policy, "dtype": str(params.dtype)}
    for name in done[0]:
        own = [turn[name] for turn in done]
        row[name] = {
            "seconds": spread([turn.seconds for turn in own]),
            "tokens_read": spread([turn.tokens_read for turn in own]),
        }
    return row


def main() -> None:
    """Runs every policy and prints a table."""
    parser = report_parser("chat_turn", "Time the second turn of a chat over a long document.")
    parser.add_argument("--model", default="smollm2", help="model (default smollm2)")
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["dense", "quest(budget=1024)"],
        help="policy expressions",
    )
    parser.add_argument(
        "--document-tokens",
        type=int,
        default=DOCUMENT_TOKENS,
        help="length of a document (default 7000)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, help="tokens per answer (default 32)"
    )
    parser.add_argument(
        "--runs", type=int, default=RUNS, help="timed runs after the warm-up (default 3)"
    )
    parser.add_argument(
        "--child", metavar="POLICY", help="measure one policy here and print a JSON line"
    )
    args = parser.parse_args()
    if min(args.document_tokens, args.new_tokens, args.runs) < 1:
        parser.error("--document-tokens, --new-tokens and --runs must be at least 1")
    sizes = (args.document_tokens, args.new_tokens, args.runs)
    if args.child is not None:
        print(json.dumps(measure(args.model, args.child, *sizes)))
        return
    options = ("model", "document_tokens", "new_tokens", "runs")
    report = {
        "benchmark": "chat_turn",
        "environment": describe(allow_modified=args.allow_modified),
        "settings": {"warm_ups": 1} | {name: getattr(args, name) for name in options},
        "results": [],
    }
    given = [
        word
        for name in options
        for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]
    for policy in args.policy:
        try:
            row = run_child("bench.chat_turn", [*given, "--child", policy], timeout_s=7200)
        except RuntimeError as error:
            raise SystemExit(f"error: {error}") from None
        report["results"].append(row)
        print(summary(row), flush=True)
        write_report(args.json, report)


def summary(row: dict[str, Any]) -> str:
    """Formats one line of the table."""

    def shown(turn: dict[str, Any]) -> str:
        seconds, read = turn["seconds"], turn["tokens_read"]["median"]
        return (
            f"{seconds['median']:.2f} s ({seconds['min']:.2f}-{seconds['max']:.2f}), "
            f"{read:.0f} tokens read"
        )

    ratio = row["whole"]["seconds"]["median"] / row["conversation"]["seconds"]["median"]
    return (
        f"{row['policy']:20} whole {shown(row['whole'])}; "
        f"conversation {shown(row['conversation'])}; {ratio:.1f}x"
    )


if __name__ == "__main__":
    main()
