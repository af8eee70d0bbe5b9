"""Chooses the format of each weight of a model before any of them is read.

With "auto", a matrix stays as its file has it if a kernel multiplies by it here, and is widened to
numbers of the model's dtype otherwise; with "stored", it also stays without kernels. `jsparse.load`
follows this plan, and `jsparse info` prints it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jsparse.models.joined_blocks import common_form
from jsparse.models.quantized import FormAt, is_matrix, name_of
from jsparse.models.weights import TensorStore, Weight
from jsparse.pallas_kernels.quantized_product.api import no_kernel
from jsparse.pallas_kernels.weight_blocks import FORMS, Form

WEIGHTS = ("auto", "stored", "plain", "q8_0", "bf16")
_FLOATS = {"float32", "bfloat16", "float16"}
NO_EXPERTS = "holds experts, which are not stored in blocks: must be 'auto' or 'plain'"


class Planned(NamedTuple):
    """A weight and the format in which it is loaded.

    Attributes:
        weight: the weight.
        kinds: the types of its tensors in the checkpoint, such as "q4_k".
        stored: the formats of these tensors, None for those that cannot stay in blocks.
        form: its format; None: numbers of the model's dtype.
        reason: why a quantised matrix is widened, or "".
    """

    weight: Weight
    kinds: tuple[str, ...]
    stored: tuple[Form | None, ...]
    form: Form | None
    reason: str = ""

    def nbytes(self, dtype: Any) -> int:
        """Returns the bytes of its arrays in a model of this dtype."""
        made = self.weight.arrays(self.form, dtype).values()
        return sum(array.size * array.dtype.itemsize for array in made)


def parse_weights(weights: Any, dtype: Any) -> str:
    """Returns an option of `jsparse.load` for a model's dtype, with "plain" for "bf16".

    Raises:
        ValueError: it is none of them, or "bf16" for another dtype.
    """
    if weights is None:
        return "auto"
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r}: must be one of {list(WEIGHTS)} or None")
    if weights != "bf16":
        return weights
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise ValueError(
            f"weights='bf16': the model's dtype is {jnp.dtype(dtype)}: must be bfloat16, or "
            "weights='plain' for numbers of any dtype"
        )
    return "plain"


def plan_weights(
    weights: Sequence[Weight], store: TensorStore, option: str, dtype: Any, ranks: int = 1
) -> list[Planned]:
    """Plans a checkpoint's weights; `option` is a result of `parse_weights` for a dtype.

    Raises:
        ValueError: a matrix does not fit Q8_0, which the option asks for.
    """
    planned, tied = [], all(weight.path != "lm_head" for weight in weights)
    for weight in weights:
        # only a tied embedding is divided, for the logits
        parts = 1 if weight.path == "embed" and not tied else ranks
        names = [source.name for source in weight.sources]
        kinds, stored = map(store.kind, names), map(store.form, names)
        planned.append(plan_weight(weight, tuple(kinds), tuple(stored), option, dtype, parts))
    return planned


def plan_weight(
    weight: Weight,
    kinds: tuple[str, ...],
    stored: tuple[Form | None, ...],
    option: str,
    dtype: Any,
    ranks: int = 1,
    *,
    saved: bool = False,
) -> Planned:
    """Plans one weight; one `saved` in blocks stays in blocks on any device."""
    found = Planned(weight, kinds, stored, None)
    if weight.experts:
        if option == "q8_0":
            raise ValueError(f"weights='q8_0': {weight.path} {NO_EXPERTS}")
        quantised = set(kinds) - _FLOATS
        return found._replace(reason="no kernel reads experts in blocks" if quantised else "")
    if not weight.is_matrix or option == "plain":
        return found
    out, width = weight.joined_shape
    if option == "q8_0":
        if wrong := misfit(weight.path, width, FORMS["q8_0"], ranks):
            raise ValueError(f"weights='q8_0': {weight.path} {wrong}")
        return found._replace(form=FORMS["q8_0"])
    forms = [form for form in stored if form is not None]
    if not forms:
        quantised = set(kinds) - _FLOATS
        return found._replace(reason="no kernel reads this format" if quantised else "")
    form = common_form(forms) if len(forms) == len(stored) else None
    if form is None:
        return found._replace(reason="joins tensors of different formats")
    reason = misfit(weight.path, width, form, ranks)
    if reason is None and not saved and option != "stored":
        sizes = (out, width // ranks) if sums_over_ranks(weight.path) else (out // ranks, width)
        why = no_kernel(form, *sizes, dtype)
        reason = why and f"a kernel {why}"
    return found._replace(form=form) if reason is None else found._replace(reason=reason)


def misfit(path: str, width: int, form: Form, ranks: int = 1) -> str | None:
    """Returns why a matrix of this width, or a rank's part, is not in whole blocks, or None."""
    parts = ranks if sums_over_ranks(path) else 1
    if width % (form.multiple * parts) == 0:
        return None
    among = f" on {parts} devices" if parts > 1 else ""
    return f"sums over {width} numbers: must be a multiple of {form.multiple * parts}{among}"


def sums_over_ranks(path: str) -> bool:
    """Returns whether each rank has some columns of the matrix at a path, not some rows."""
    return path.split("/")[-2:-1] in (["o"], ["down"])


def require_fit(weights: Iterable[Weight], form_at: FormAt, ranks: int = 1) -> None:
    """Raises ValueError if a matrix, or a rank's part, is not in whole blocks of its format."""
    for weight in weights:
        form = form_at(weight.path) if is_matrix(weight.path) else None
        wrong = form and misfit(weight.path, weight.joined_shape[-1], form, ranks)
        if form is not None and wrong:
            raise ValueError(f"weights={name_of(form)!r}: {weight.path} {wrong}")


def named_types(dtype: Any, kv_cache_dtype: str, forms: Collection[Form]) -> str:
    """Returns the names of the types of weights, K and V, for messages and records."""
    *names, last = [*dict.fromkeys(map(name_of, sorted(forms))), str(np.dtype(dtype))]
    weights = f"{', '.join(names)} and {last}" if names else last
    return weights if kv_cache_dtype == "auto" else f"{weights}, {kv_cache_dtype} KV"


def forms_of(planned: Sequence[Planned]) -> set[Form]:
    """Returns the formats of a model's matrices in blocks."""
    return {each.form for each in planned if each.form is not None}
