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
        "Branch on layers and shapes alone, and choose between values with jnp.where.",
    ),
    ContractRule(
        "owners",
        "every array of the state belongs to rows or to pages",
        "Every array of the state has an axis of spec.batch or one of spec.pages, not both.",
        "Give it an axis of spec.batch, or of spec.pages where it lies beside K; never compute the "
        "number of pages from the batch.",
    ),
    ContractRule(
        "selections",
        "selections list what heads hold, in order",
        "The first `count` ids are distinct, ascend and are of slots that hold a token, and the "
        "rest are 0.",
        "Make the list with threshold_select, from_page_mask or from_token_mask.",
    ),
    ContractRule(
        "finite",
        "results are finite",
        "What a policy computes is finite, also where a row or a page holds nothing.",
        "Mask with jnp.where before you divide or take a logarithm, and mask slots behind lengths.",
    ),
    ContractRule(
        "rows",
        "rows do not depend on each other",
        "Rows are treated apart: what becomes of one does not depend on the others.",
        "Reduce over heads, pages and tokens of one row, never over the axis of the batch.",
    ),
    ContractRule(
        "alone",
        "a row alone gives what it gives in a batch",
        "Nothing depends on how many rows the batch has.",
        "Take no budget, size or threshold from the batch's size.",
    ),
    ContractRule(
        "pieces",
        "a prompt gives the same however it is read",
        "The state after the prompt does not depend on how chunks cut it, nor on what lies behind "
        "`valid`.",
        "Take in the first view.valid tokens at their positions, and build what needs the whole "
        "prompt where view.last is true, from nothing.",
    ),
    ContractRule(
        "pool",
        "a shared pool of used pages gives the same",
        "In a shared pool pages lie anywhere and come back with what their last owner wrote.",
        "Find pages by the block table, as read_pages does, and let a page's first token replace "
        "what is there.",
    ),
    ContractRule(
        "inactive",
        "a row that sits out a step changes nothing",
        "A policy that writes page arrays skips inactive rows itself.",
        "Take in taking_part(view, tokens) tokens of each row, or build the state with sidecar.",
    ),
    ContractRule(
        "retrace",
        "nothing is traced again from step to step",
        "A decode step is compiled once, for all prompts of a size.",
        "Give the arrays of init a dtype, such as jnp.zeros(shape, jnp.float32), and decide no "
        "shape by what a step has seen.",
    ),
    ContractRule(
        "budget",
        "with a budget for all tokens it is dense",
        "With a budget of all tokens a method equals dense attention.",
        "Cap the budget at what is held, and list every page that holds a token, the newest too.",
    ),
    ContractRule(
        "mass",
        "selections carry no less attention than random ones",
        "On a model whose heads weigh near tokens most, a selection has at least three quarters of "
        "the attention mass that a random one of its size has.",
        "Rank tokens by q and the keys, the greatest first, or attend to the newest ones as well.",
    ),
)


NAMES = tuple(rule.name for rule in RULES)
