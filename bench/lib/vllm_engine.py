"""Runs cases of bench.peers in vLLM; a process of vLLM's own environment, which needs no jax.

    python -m bench.lib.vllm_engine FOLDER OPTIONS CASE…

FOLDER has a config.json. Weights are random; OPTIONS are further arguments of vllm.LLM, in JSON.
Prints one line of JSON per case.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lib.engine_driver import CASES, ENGINE_SIZES, figures, warm_up


class VLLM:
    """vLLM's engine, for the driver."""

    def __init__(self, engine: Any, sampling: Any) -> None:
        """Wraps an LLMEngine; `sampling` is the class SamplingParams."""
        self.engine, self.sampling = engine, sampling

    def add(self, name: str, ids: list[int], tokens: int) -> None:
        """Queues a request."""
        options = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        prompt = {"type": "token", "prompt_token_ids": ids}
        self.engine.add_request(name, prompt, self.sampling(detokenize=False, **options))

    def step(self) -> Mapping[str, int]:
        """Advances all requests; vLLM may add a suffix to their names."""
        done = self.engine.step()
        return {
            each.request_id.partition("-")[0]: len(each.outputs[0].token_ids)
            for each in done
            if each.outputs[0].token_ids
        }


def main() -> None:
    """Loads the model once and runs the cases."""
    began = time.perf_counter()
    import vllm

    folder, options, *names = sys.argv[1:]
    cases = [CASES[name] for name in names]
    length, rows = ENGINE_SIZES[cases[0].shape]
    own = {"max_model_len": length, "max_num_seqs": rows, "dtype": "bfloat16"}
    own |= {"load_format": "dummy", "skip_tokenizer_init": True, "generation_config": "vllm"}
    llm = vllm.LLM(model=folder, enable_prefix_caching=False, **own | json.loads(options))
    engine = VLLM(llm.llm_engine, vllm.SamplingParams)
    start = {"vllm": vllm.__version__, "start_seconds": time.perf_counter() - began}
    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    for case in cases:
        warm_up(case, engine, size)
        row = {"case": case.name, **start, **figures(case, engine, size)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
