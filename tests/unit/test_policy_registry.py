"""The registry of policies: what help texts and checks follow from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.policies import POLICIES, policy
from specexec_cli.drafting.policies.fixed import Fixed
from specexec_cli.drafting.policies.heuristic import Heuristic
from specexec_cli.drafting.sources import draft_source
from specexec_cli.lab.baselines import SOURCES, policies_for
from specexec_cli.planning.request import TreeRequest


def test_the_command_line_knows_the_policies_without_loading_numpy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from specexec_cli.cli.main import app;"
        "asked = ['generate', '--help-all'];"
        "shown = CliRunner().invoke(app, asked, env={'COLUMNS': '400'}).output;"
        "assert 'cost (as much as pays' in shown, shown;"
        "print([m for m in ('numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_method_is_told_of_the_policies_that_suit_it() -> None:
    assert {method: policies_for(method) for method in SOURCES} == {
        "specexec": ("fixed", "heuristic", "disco", "cost"),
        "specexec-paper": ("fixed", "heuristic"),
        "chain": ("fixed", "heuristic", "disco"),
        "chain-coupled": ("fixed", "heuristic", "disco", "oracle"),
        "specinfer": ("fixed", "heuristic"),
        "beam": ("fixed", "heuristic", "disco"),
        "beam-pruned": ("fixed", "heuristic", "disco"),
        "suffix": ("fixed", "heuristic", "cost"),
    }


def test_plain_decoding_has_no_trees_to_size() -> None:
    assert policies_for("autoregressive") == policies_for("dsi") == ()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'fixed' is registered twice"):
        policy("fixed", help="")(Heuristic)
    assert POLICIES["fixed"].make is Fixed
    beam = SOURCES["beam"].make
    with pytest.raises(ValueError, match="'beam' is registered twice"):
        draft_source("beam")(SOURCES["chain"].make)
    assert SOURCES["beam"].make is beam


@pytest.mark.parametrize("method", ["specexec", "autoregressive", "dsi"])
def test_the_policy_of_auto_is_registered_for_the_method(method: str) -> None:
    name = TreeRequest().resolve(TreeConfig(), method).policy  # type: ignore[arg-type]
    assert name in (policies_for(method) or POLICIES)


def test_an_entry_is_what_was_registered() -> None:
    entry = POLICIES["cost"]
    assert (entry.name, entry.methods, entry.needs) == ("cost", ("specexec", "suffix"), "cost")
    assert entry.help.startswith("as much as pays")
    assert POLICIES["fixed"].needs is POLICIES["fixed"].methods is None
