"""One of two processes that run one model together; run by test_processes.

Arguments: its number, the coordinator's port, and JSON: the policy, the devices of each process,
the ranks if they are fewer, whether programs are prepared, and its processors.
"""

import json
import os
import sys
from typing import Any

import jax

from jsparse.machine import processes


def main(number: int, port: int, given: dict[str, Any]) -> None:
    """Serves prompts, or follows the process that does."""
    if "processors" in given:
        os.cpu_count = lambda: given["processors"]
    jax.config.update("jax_num_cpu_devices", given.get("devices", 1))
    processes.join(2, number, "127.0.0.1", port)

    import jsparse
    from jsparse.models.checkpoint import spread
    from tests.support.tiny import (  # makes arrays, so jax has to know its processes
        random_prompts,
        tiny_params,
    )

    ranks = given.get("ranks", jax.device_count())
    params = spread(tiny_params(num_layers=2, num_heads=2 * ranks, num_kv_heads=ranks), ranks)
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 512}
    sizes |= {"prepare": given.get("prepare", False)}
    llm = jsparse.LLM(params, given.get("policy", "quest(budget=16)"), check_ranks=True, **sizes)
    print("made", flush=True)
    drawn = {"temperature": 0.8, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    outs = llm.generate(random_prompts((9, 41, 21), seed=5), jsparse.SamplingParams(**drawn))
    print(json.dumps([out.outputs[0].token_ids for out in outs]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
