"""Runs a recorded session again: the same programs in the same order, without the scheduler."""

import os

import numpy as np

from jsparse.cache import CacheSpec
from jsparse.engine import plan_log, setup
from jsparse.engine.outputs import Growing
from jsparse.engine.packing import unpack
from jsparse.engine.programs import Programs
from jsparse.engine.runner import Runner, neutral
from jsparse.engine.scheduler import Sizes
from jsparse.models.checkpoint import Params
from jsparse.policies.expressions import as_policy
from jsparse.runtime.admission import admit
from jsparse.runtime.sampling import row_sampling


def replay(
    params: Params, file: str | os.PathLike[str]
) -> dict[int, tuple[list[int], list[float]]]:
    """Returns the tokens and log-probabilities of each answer in a log, computed anew.

    They have the bits that `plan_log.read(file).got` has, on the same device with the same
    programs.

    Raises:
        ValueError: the file is no log, or is of another model.
    """
    recorded = plan_log.read(file)
    engine, config = recorded.engine, params.config
    if (params.name, str(params.dtype)) != (engine["model"], engine["dtype"]):
        raise ValueError(
            f"params is {params.name!r} in {params.dtype}: must be {engine['model']!r} in "
            f"{engine['dtype']}, of which the log is"
        )
    ladder = tuple(map(tuple, engine["sizes"]["ladder"]))
    lists = {name: tuple(engine["sizes"][name]) for name in ("tails", "rows")}
    sizes = Sizes(**engine["sizes"] | {"ladder": ladder} | lists)
    spec = setup.cache_spec(
        params,
        max_num_seqs=sizes.num_slots,
        max_model_len=sizes.max_model_len,
        page_size=sizes.page_size,
    )
    knobs, layer_stats = tuple(engine["per_request"]), engine["layer_stats"]
    policy = admit(
        params,
        as_policy(engine["policy"]),
        spec,
        rows_join=True,
        per_request=knobs,
        allocates=False,
    ).policy
    spec: CacheSpec = spec._replace(pool_pages=sizes.num_groups * spec.num_kv_heads)
    programs = Programs(
        *(params, policy, spec, sizes),
        knobs=knobs,
        layer_stats=layer_stats,
        sampling=row_sampling([neutral()], config.vocab_size),
    )
    requests = recorded.requests
    runner = Runner(
        programs, policy, spec, sizes, config.vocab_size, knobs, lambda nth: requests[nth]
    )
    growing = {nth: Growing(request, 0, params.tokenizer) for nth, request in requests.items()}
    for plan in recorded.plans:
        for flight in runner.run(plan):
            packed = np.asarray(flight.packed)
            for nth, row, steps in flight.rows:
                for step in range(steps):
                    growing[nth].take(unpack(packed[step, row], spec.num_layers, layer_stats))
    return {nth: (own.token_ids, own.logprobs) for nth, own in growing.items()}
