"""Makes long real texts, and tasks in the form of LongBench and RULER, from installed files.

Nothing is downloaded. Modules of Python's standard library are the code, licences of installed
packages the prose, this repository's records the JSON, and a chat of many turns asks for topics of
Python's reference. The folders work with `jsparse eval --files` and `--text`:

    N/lcc.jsonl               LongBench's task lcc, for prompts of N tokens: a module's next line.
                              Only lines that repeat a name from earlier text are used, and only if
                              it is not within the last FAR characters; no prompt is cut.
    N/PaulGrahamEssays.json   licences, under the file name of RULER's tasks: haystacks for
                              niah_single_2, niah_multikey_1 and others
    texts/                    code.txt, prose.txt, json.txt and chat.txt, for kl, ppl and attention

    python -m bench.real_text --out build/real_text
    jsparse eval --files build/real_text/1984 --tasks longbench_lcc,niah_single_2 --lengths 2048 …
    jsparse eval --text build/real_text/texts --tasks kl --lengths 4096 …
"""

import argparse
import hashlib
import json
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

from bench.lib.environment import REPOSITORY

LENGTHS = (1984, 4032)  # tokens of a prompt; with the answer below 2K and 4K
CHARACTERS = 2.6  # per token of code, below that of every model here
FAR = 2000  # characters between a line and the name that it repeats
SAMPLES = 100  # of each length
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{7,}")
WANTED = range(20, 81)  # characters of a target line
MIN_LICENCE = 5000  # characters
RECORD, LONG_TURN = 20_000, 30_000  # maximum characters of a record, and of a turn


class Line(NamedTuple):
    """A line of a module that repeats a name from far before.

    Attributes:
        first: the start of the text before it, a whole line.
        start: the start of the line.
        text: the line without its end.
    """

    first: int
    start: int
    text: str


def modules() -> list[tuple[str, str]]:
    """Returns the names and texts of the standard library's modules, without packages, in order."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [(path.name, path.read_text("utf-8")) for path in sorted(folder.glob("*.py"))]


def licences() -> list[str]:
    """Returns the long licences of installed packages, without duplicates, longest first."""
    found = {
        path.read_text("utf-8", "replace")
        for distribution in distributions()
        for file in distribution.files or ()
        if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE"))
        for path in [Path(str(distribution.locate_file(file)))]
        if path.is_file()
    }
    return sorted((text for text in found if len(text) >= MIN_LICENCE), key=lambda x: (-len(x), x))


def records() -> str:
    """Returns this repository's committed measurements, the first characters of each."""
    found = sorted((REPOSITORY / "bench" / "results").glob("*/*.json"))
    return "\n".join(path.read_text("utf-8")[:RECORD] for path in found)


def chat() -> str:
    """Returns a chat of many turns, in the format of ChatML."""
    turns = [
        f"<|im_start|>user\nExplain {name} in Python.<|im_end|>\n"
        f"<|im_start|>assistant\n{text.strip()}<|im_end|>\n"
        for name, text in sorted(topics.topics.items())
        if len(text) <= LONG_TURN
    ]
    return "".join(random.Random(0).sample(turns, len(turns)))


def repeating(text: str, before: int) -> Iterator[Line]:
    """Yields the lines that repeat a name from between `before` and FAR characters before them."""
    start = 0
    for whole in text.splitlines(keepends=True):
        line, stripped = whole.rstrip("\n"), whole.strip()
        if start >= before and len(stripped) in WANTED and not stripped.startswith("#"):
            first = 0 if start == before else text.index("\n", start - before - 1) + 1
            far, near = text[first : start - FAR], text[start - FAR : start]
            if any(re.search(rf"\b{x}\b", far) and x not in near for x in NAME.findall(line)):
                yield Line(first, start, line)
        start += len(whole)


def next_lines(length: int, count: int) -> list[dict[str, Any]]:
    """Returns rows in LongBench's form, with prompts of up to `length` tokens.

    A module gives one row, or more only if there are not enough modules.
    """
    before, rows = int(length * CHARACTERS), []
    rng = random.Random(length)
    drawn = [
        (name, text, rng.sample(lines, len(lines)))
        for name, text in modules()
        if (lines := list(repeating(text, before)))
    ]
    for nth in range(max((len(lines) for *_, lines in drawn), default=0)):
        for name, text, lines in rng.sample(drawn, len(drawn)):
            if nth < len(lines) and len(rows) < count:
                first, start, line = lines[nth]
                rows.append(
                    {
                        "context": text[first:start],
                        "input": "",
                        "answers": [line],
                        "all_classes": None,
                        "length": length,
                        "_id": f"{name}:{text[:start].count(chr(10)) + 1}",
                    }
                )
    return rows


def write(folder: Path, lengths: tuple[int, ...], samples: int) -> dict[str, Any]:
    """Writes the files, and returns their sources."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts").mkdir(exist_ok=True)
    prose, code = "\n\n".join(licences()), "\n\n".join(text for _, text in modules())
    texts = {"code": code, "prose": prose, "json": records(), "chat": chat()}
    files = {f"texts/{name}.txt": text for name, text in texts.items()}
    for length in lengths:
        rows = [json.dumps(row) for row in next_lines(length, samples)]
        (folder / str(length)).mkdir(exist_ok=True)
        files[f"{length}/lcc.jsonl"] = "\n".join(rows) + "\n"
        files[f"{length}/PaulGrahamEssays.json"] = json.dumps({"text": prose})
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    return {
        "python": platform.python_version(),
        "modules": len(modules()),
        "licences": len(licences()),
        "files": {
            name: {
                "characters": len(text),
                "lines": text.count("\n"),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
            for name, text in files.items()
        },
    }


def main() -> None:
    """Writes the folder and prints its contents."""
    parser = argparse.ArgumentParser(prog="python -m bench.real_text", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of prompts")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="lines of each length")
    args = parser.parse_args()
    if args.samples < 1 or min(args.lengths) * CHARACTERS <= FAR:
        parser.error(f"--samples must be at least 1, --lengths above {FAR / CHARACTERS:.0f}")
    made = write(args.out, tuple(args.lengths), args.samples)
    (args.out / "sources.json").write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    for name, of in made["files"].items():
        print(f"{name:24} {of['characters']:9,} characters, {of['lines']:7,} lines")


if __name__ == "__main__":
    main()
