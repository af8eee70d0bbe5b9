"""Records the plans of an engine, and carries them out again without its scheduler and clock."""

import copy

from jsparse.engine.llm import LLM
from jsparse.engine.runner import Runner
from jsparse.engine.step_plan import StepPlan
from jsparse.runtime.collecting import AnswerBuilder


class Recording:
    """Plans and sequences of an engine, from the time of its creation on."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self.plans = llm.engine, list[StepPlan]()
        self._builders = dict[int, AnswerBuilder]()
        self._run, self._engine._runner.run = self._engine._runner.run, self._recorded

    def _recorded(self, plan: StepPlan):
        self.plans.append(copy.deepcopy(plan))
        self._builders |= {nth: builder for nth, (*_, builder) in self._engine._live.items()}
        return self._run(plan)

    def assert_replays(self, count: int) -> None:
        """The plans alone give `count` finished sequences their bits again, over empty memory.

        The engine has no memory of its own afterwards.
        """
        engine = self._engine
        requests = {nth: builder.request for nth, builder in self._builders.items()}
        again = {
            nth: AnswerBuilder(request, 0, engine.params.tokenizer)
            for nth, request in requests.items()
        }
        runner = Runner(engine._runner._spec, engine.programs, requests.__getitem__)
        for plan in self.plans:
            for pending in runner.run(plan):
                for nth, tokens, _ in runner.results(pending):
                    again[nth].take(tokens)
        finished = [nth for nth, own in self._builders.items() if own.finish in ("stop", "length")]
        assert len(finished) == count
        for nth in finished:
            own, other = self._builders[nth], again[nth]
            assert (other.token_ids, other.logprobs) == (own.token_ids, own.logprobs)
