"""The command `jsparse check-policy`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from jsparse.cli.console import print_note
from jsparse.cli.options import POLICY_FORMS, JsonOption, complete_policy

if TYPE_CHECKING:
    from jsparse.evaluation.policy_checks import Finding

SMALL, ALL = 16, 2**20  # budgets: two pages of the trial's, and more tokens than it has
MARKS = {True: "ok", False: "BROKEN", None: "-"}


def check_policy(
    policy: Annotated[
        str,
        Argument(
            metavar="<policy>",
            autocompletion=complete_policy,
            help=f"Policy to check: {POLICY_FORMS}",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Check that a policy keeps the contract, on a small random model; no GPU is needed.

    The default budget is 16 tokens here, since prompts are short. The exit code is 1 if a rule is
    broken.

    Example: jsparse check-policy my_policy.py:my_quest
    """
    from jsparse.evaluation.policy_checks import check
    from jsparse.policies.own_code import resolve, with_budget
    from jsparse.runtime.compilation import keep_compilations

    keep_compilations()
    chosen = resolve(policy)
    checked = with_budget(policy, SMALL, instead=False) or chosen
    found = check(checked, with_budget(policy, ALL))
    if as_json:
        print(json.dumps({"policy": str(checked), "rules": list(map(_plain, found.findings))}))
    else:
        print(checked)
        for finding in found.findings:
            _show(finding)
        print("broken: " + ", ".join(found.broken) if found.broken else "no rule is broken")
    if found.leaves_out is False:
        print_note(
            "it attends to all tokens of these short prompts, so that little was checked: give it "
            "arguments with which it leaves some out"
        )
    if found.broken:
        raise typer.Exit(1)


def _plain(finding: "Finding") -> dict[str, str | bool | None]:
    return {"name": finding.rule.name, "kept": finding.kept, "detail": finding.detail}


def _show(finding: "Finding") -> None:
    rule = finding.rule
    print(f"{MARKS[finding.kept]:6}  {rule.name:10}  {rule.promise}")
    if finding.kept and finding.detail:
        print(f"{'':20}measured: {finding.detail}")
    elif finding.kept is None:
        print(f"{'':20}not checked: {finding.detail}")
    elif finding.kept is False:
        for name, text in (("seen", finding.detail), ("rule", rule.contract), ("fix", rule.fix)):
            print(f"{'':20}{name}: {text}")
