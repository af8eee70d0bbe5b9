"""The rules of the contract that a policy is checked against."""

from typing import NamedTuple


class ContractRule(NamedTuple):
    """One rule of the contract: a promise, the demand of docs/contract.md and the usual repair."""

    name: str
    promise: str
    contract: str
    fix: str


RULES = (
    ContractRule(
        "types",
        "the state keeps its shapes and types",
        "The state is a tree of arrays of fixed shapes and dtypes, which every hook returns.",
        "Give the arrays of init a dtype, and cast what a hook writes: new.astype(old.dtype).",
    ),
    ContractRule(
        "runs",
        "hooks can be traced and return what they must",
        "select returns (Selection, Summary or None, state) and the other hooks the state, and "
        "none branches on values.",
        "Branch only on layers and shapes, and choose between values with jnp.where.",
    ),
    ContractRule(
        "owners",
        "every array of the state belongs to rows or to pages",
        "Every array of the state has an axis of spec.batch or one of spec.pages, not both.",
        "Give it an axis of spec.batch, or of spec.pages if it is paged like K; never compute the "
        "number of pages from the batch.",
    ),
    ContractRule(
        "selections",
        "selections list what heads hold, in order",
        "The first `count` ids are distinct, ascending and of slots with a token, and the rest "
        "are 0.",
        "Make the list with threshold_select, from_page_mask or from_token_mask.",
    ),
    ContractRule(
        "finite",
        "results are finite",
        "A policy's results are finite, also for an empty row or page.",
        "Mask with jnp.where before a division or logarithm, and mask slots past the lengths.",
    ),
    ContractRule(
        "rows",
        "rows do not depend on each other",
        "Rows are independent: the result of a row does not depend on the others.",
        "Reduce over heads, pages and tokens of one row, never over the axis of the batch.",
    ),
    ContractRule(
        "alone",
        "a row alone gives what it gives in a batch",
        "Nothing depends on the batch size.",
        "Derive no budget, size or threshold from the batch size.",
    ),
    ContractRule(
        "pieces",
        "a prompt gives the same however it is read",
        "The state after the prompt does not depend on the chunking, nor on tokens past `valid`.",
        "Process the first view.valid tokens at their positions. Build anything that needs the "
        "whole prompt from scratch when view.last is true.",
    ),
    ContractRule(
        "pool",
        "a shared pool of used pages gives the same",
        "In a shared pool, pages are in any order and still contain their last owner's data.",
        "Find pages by the block table, as read_pages does, and let a page's first token "
        "overwrite old data.",
    ),
    ContractRule(
        "inactive",
        "a row that sits out a step changes nothing",
        "A policy that writes page arrays skips inactive rows itself.",
        "Process taking_part(view, tokens) tokens of each row, or build the state with sidecar.",
    ),
    ContractRule(
        "retrace",
        "nothing is traced again from step to step",
        "A decode step is compiled once, for all prompts of a size.",
        "Give the arrays of init a dtype, such as jnp.zeros(shape, jnp.float32), and let no "
        "shape depend on the data of a step.",
    ),
    ContractRule(
        "budget",
        "with a budget for all tokens it is dense",
        "With a budget of all tokens a method equals dense attention.",
        "Cap the budget at the number of tokens, and list every page with a token, including the "
        "newest.",
    ),
    ContractRule(
        "mass",
        "selections carry no less attention than random ones",
        "On a model whose heads weigh near tokens most, a selection has at least three quarters of "
        "the attention mass of a random one of its size.",
        "Rank tokens by q and the keys, the largest first, or also attend to the newest ones.",
    ),
)


NAMES = tuple(rule.name for rule in RULES)
