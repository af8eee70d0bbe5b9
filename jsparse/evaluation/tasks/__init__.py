"""Generates or reads long-context tasks, for any tokenizer and length.

RULER's tasks have NVIDIA's templates, needles, numbers of keys, values, queries and hops,
frequencies, generated tokens (niah 128, vt 30, cwe 120, fwe 50, qa 32), answer prefixes, scoring
and definition of length (prompt, prefix and generated tokens, without a chat template). All of them
differ in three ways:

- A sample has its own random generator, seeded by (42, task, length, index); NVIDIA has one for the
  run and shuffles every sample alike.
- Filler is sized for each sample, to the last unit that fits; NVIDIA sizes it once, and cuts 5 to
  500 units if it does not fit.
- Prompt and prefix are counted separately.

Word lists are those of the installed wonderwords.

The list has NVIDIA's definition of each task and, after "here", further differences:

- niah_single_1: one key (adjective-noun) with a number of 7 digits among lines of noise.
- niah_single_2, niah_single_3: the same in essays; in the latter the value is a UUID. Here
  sentences end at . ! or ? before a space; NVIDIA uses nltk.
- niah_multikey_1, niah_multivalue, niah_multiquery: four keys and a question for one, four values
  of a key, a question for four keys; in essays. Here they differ as niah_single_2 does.
- niah_multikey_2, niah_multikey_3: the haystack is other needles; in the latter keys and values are
  UUIDs. Here no key or value occurs twice.
- vt: one chain of five variables (four hops) in noise, after an example of at most 500 tokens. Here
  every sample has its own example; NVIDIA renames the variables of one.
- cwe: ten words 30 times and others 3 times (6 times and once in budgets below 4096 tokens), after
  an example. Here texts that need more words than wonderwords has (8166 in its version 3.0.1) raise
  an error; NVIDIA continues with another list.
- fwe: coded words of six letters, with frequencies by Zipf's law with alpha 2; the most frequent,
  dots, does not count. Here the third answer is always more frequent than the next word.
- qa_1, qa_2: questions of SQuAD and HotpotQA about documents among others; any answer counts.

`passkey` and `niah_grid` are described in `jsparse.evaluation.tasks.passkey`, `json_retrieval` in
`jsparse.evaluation.tasks.json_retrieval`, `passkey_turn2` and `niah_single_1_turn2` in
`jsparse.evaluation.tasks.second_turn`, `longbench_...` in `jsparse.evaluation.tasks.longbench`,
`questions` in `jsparse.evaluation.tasks.questions`.
"""

import os
from pathlib import Path

from jsparse.evaluation.tasks import (
    json_retrieval,
    longbench,
    passkey,
    questions,
    ruler,
    second_turn,
)
from jsparse.evaluation.tasks.sample import EncodeFn, Sample, Task

__all__ = ["TASKS", "EncodeFn", "Sample", "Task", "parse"]

TASKS = {
    **ruler.TASKS,
    **passkey.TASKS,
    **json_retrieval.TASKS,
    **second_turn.TASKS,
    **longbench.TASKS,
    **questions.TASKS,
}


def parse(
    names: str,
    files: str | os.PathLike[str] | None = None,
    max_new_tokens: int = questions.MAX_NEW_TOKENS,
) -> list[Task]:
    """Returns the tasks of a comma-separated list of names of `TASKS`.

    `files` is the folder of PaulGrahamEssays.json, squad.json, hotpotqa.json, questions.jsonl, and
    of LongBench's NAME.jsonl and v2's data.json; without it LongBench is read from the Hub.

    Raises:
        ValueError: a name is unknown or given twice, or a file that the task needs is missing.
    """
    listed = [name.strip() for name in names.split(",")]
    for i, name in enumerate(listed):
        if name not in TASKS:
            raise ValueError(f"task {name!r} is unknown: must be one of {', '.join(TASKS)}")
        if name in listed[:i]:
            raise ValueError(f"task {name!r} is given twice: must be given once")
    folder = None if files is None else Path(files)
    return [
        questions.TASKS[name](name, folder, max_new_tokens)
        if name in questions.TASKS
        else TASKS[name](name, folder)
        for name in listed
    ]
