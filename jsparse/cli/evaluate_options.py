"""The options of `jsparse eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True)
class EvaluateOptions:
    """The measurements to take: keyword arguments of `plan`, without policies."""

    tasks: Annotated[
        str,
        Option(
            help="Comma-separated tasks: kl, ppl, attention, drafts, passkey, niah_grid, "
            "json_retrieval, RULER's (vt, cwe, …), longbench_…, questions."
        ),
    ] = "kl,ppl,passkey"
    lengths: Annotated[
        str,
        Option(
            help="Comma-separated lengths in tokens, prompt and output together; the task "
            "questions has its own."
        ),
    ] = "1024"
    max_new_tokens: Annotated[
        int, Option(help="Maximum number of tokens per answer of the task questions.")
    ] = 8192
    samples: Annotated[int, Option(help="Number of samples per task and length.")] = 20
    batch: Annotated[int, Option(help="Number of prompts per batch.")] = 4
    steps: Annotated[
        int, Option(help="Decode steps per sample of kl, ppl, attention and drafts.")
    ] = 64
    chat: Annotated[
        bool, Option("--chat", help="Send each prompt as a user message, for a chat model.")
    ] = False
    yardstick: Annotated[
        bool,
        Option(
            "--yardstick",
            help="With the task kl, measure exact top-k attention that reads the same bytes as "
            "each policy.",
        ),
    ] = False
    text: Annotated[
        Path | None,
        Option(
            help="UTF-8 text file for kl, ppl, attention and drafts, or a folder of .txt files "
            "that take turns, instead of the built-in text."
        ),
    ] = None
    files: Annotated[
        Path | None,
        Option(
            help="Folder with the files that some tasks need, such as questions.jsonl: one object "
            "per line with question, answer and, optionally, id."
        ),
    ] = None


OutOption = Annotated[
    Path | None,
    Option("--json", help="File to write all results to; partial results are kept next to it."),
]
ResumeOption = Annotated[
    bool, Option("--resume", help="Continue an unfinished run that used --json.")
]
ReportOption = Annotated[
    Path | None,
    Option(help="File to write a page to, for a browser: tables, plots, samples; no network."),
]
