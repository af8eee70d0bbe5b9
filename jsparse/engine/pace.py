"""Estimates how long programs take to read prompts, from how long they have taken."""

from jsparse.models.config import ModelConfig

# of an estimate, the share that the newest program has
NEWEST = 0.3


class Pace:
    """Learns how fast prompts are read.

    The work of a chunk is its tokens, each of which counts more the further it is from the prompt's
    beginning, by the arithmetic of the model's matrices and of its attention.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Prepares estimates for a model; nothing is known."""
        width, head = config.hidden_size, config.head_dim
        projections = width * head * 2 * (config.num_heads + config.num_kv_heads)
        matrices = projections + 3 * width * config.intermediate_size
        # the position where a token's attention takes as much arithmetic as its matrices
        self._even = matrices / (2 * config.num_heads * head)
        self._per_work: dict[tuple[int, int], float] = {}

    def observe(self, rows: int, size: int, start: int, milliseconds: float) -> None:
        """Takes in that a program read `rows` chunks of `size` tokens from `start` on."""
        found = milliseconds / self._work(rows, size, start)
        before = self._per_work.get((rows, size), found)
        self._per_work[rows, size] = before + NEWEST * (found - before)

    def estimate(self, rows: int, size: int, start: int) -> float | None:
        """Returns the milliseconds that such a program takes; None before any has been observed.

        Where only programs of other sizes have been, it is as fast as the slowest of these.
        """
        if not self._per_work:
            return None
        per_work = self._per_work.get((rows, size))
        if per_work is None:
            per_work = max(self._per_work.values())
        return per_work * self._work(rows, size, start)

    def _work(self, rows: int, size: int, start: int) -> float:
        return rows * size * (1 + (start + size / 2) / self._even)
