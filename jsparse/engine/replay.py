"""Runs a recorded session again: the same programs in the same order, without the scheduler."""

import os

from jsparse.engine import plan_log, setup
from jsparse.engine.outputs import AnswerBuilder
from jsparse.engine.programs import Programs
from jsparse.engine.runner import Runner
from jsparse.engine.sizes import EngineSizes
from jsparse.models.checkpoint import Params, require_in_one_process
from jsparse.policies.expressions import as_policy
from jsparse.runtime.admission import admit


def replay(
    params: Params, file: str | os.PathLike[str]
) -> dict[int, tuple[list[int], list[float]]]:
    """Returns the tokens and log-probabilities of each answer in a log, computed anew.

    They have the bits that `plan_log.read(file).got` has, on the same device with the same
    programs.

    Raises:
        ValueError: the file is no log, or is of another model, or several processes have this one.
    """
    require_in_one_process(params)
    recorded = plan_log.read(file)
    engine = recorded.engine
    if (params.name, params.types) != (engine["model"], engine["dtype"]):
        raise ValueError(
            f"params is {params.name!r} in {params.types}: must be {engine['model']!r} in "
            f"{engine['dtype']}, of which the log is"
        )
    ladder = tuple(map(tuple, engine["sizes"]["ladder"]))
    lists = {
        name: tuple(engine["sizes"].get(name, ()))
        for name in ("tails", "rows", "prefill_rows", "drafts", "prompt_pages")
    }
    sizes = EngineSizes(**engine["sizes"] | {"ladder": ladder} | lists)
    rows = setup.cache_spec(
        params,
        max_num_seqs=sizes.num_slots,
        max_model_len=sizes.max_model_len,
        page_size=sizes.page_size,
    )
    knobs = tuple(engine["per_request"])
    policy = admit(
        params,
        as_policy(engine["policy"]),
        rows,
        rows_join=True,
        per_request=knobs,
        allocates=False,
        drafts=max(sizes.drafts, default=0),
    ).policy
    cache = setup.pooled(rows, sizes)
    spec = setup.EngineSpec(params, policy, cache, sizes, knobs, engine["layer_stats"])
    runner = Runner(spec, Programs(spec), recorded.requests.__getitem__)
    builders = {
        nth: AnswerBuilder(request, 0, params.tokenizer)
        for nth, request in recorded.requests.items()
    }
    for plan in recorded.plans:
        for pending in runner.run(plan):
            for nth, tokens, _ in runner.results(pending):
                builders[nth].take(tokens)
    return {nth: (own.token_ids, own.logprobs) for nth, own in builders.items()}
