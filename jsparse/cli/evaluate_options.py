"""Declares the options of `jsparse eval`."""

from pathlib import Path
from typing import Annotated

from typer import Option

TasksOption = Annotated[
    str,
    Option(
        help="Comma-separated tasks: kl, ppl, attention, drafts, passkey, niah_grid, "
        "json_retrieval, RULER's (vt, cwe, …), longbench_…, questions."
    ),
]
LengthsOption = Annotated[
    str,
    Option(
        help="Comma-separated lengths in tokens, prompt and answer together; the task "
        "questions has its own."
    ),
]
MaxNewTokensOption = Annotated[
    int, Option(help="Maximum number of tokens per answer of the task questions.")
]
SamplesOption = Annotated[int, Option(help="Number of samples per task and length.")]
BatchOption = Annotated[int, Option(help="Number of prompts per batch.")]
StepsOption = Annotated[
    int, Option(help="Decode steps per sample of kl, ppl, attention and drafts.")
]
ChatOption = Annotated[
    bool, Option("--chat", help="Send each prompt as a user message, for a chat model.")
]
YardstickOption = Annotated[
    bool,
    Option(
        "--yardstick",
        help="Beside the task kl, measure exact top-k attention that reads as many bytes as "
        "each policy.",
    ),
]
TextOption = Annotated[
    Path | None,
    Option(help="UTF-8 text file for kl, ppl, attention and drafts, instead of the built-in text."),
]
FilesOption = Annotated[
    Path | None,
    Option(
        help="Folder with the files that some tasks need, such as questions.jsonl: one object "
        "per line with question, answer and, optionally, id."
    ),
]
OutOption = Annotated[
    Path | None,
    Option("--json", help="File to write all results to; partial results are kept beside it."),
]
ResumeOption = Annotated[
    bool, Option("--resume", help="Continue an unfinished run that used --json.")
]
ReportOption = Annotated[
    Path | None,
    Option(help="File to write a page to, for a browser: tables, plots, samples; no network."),
]
