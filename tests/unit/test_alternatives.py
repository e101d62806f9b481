"""An error about memory names changes that would help, and each of them does."""

from __future__ import annotations

import pytest
from cli_runner import run_cli
from computer import Computer

from specexec_cli.cli.mends import with_mend
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.planning.alternatives import changes_that_fit
from specexec_cli.planning.machine import Site, described_site
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import RequestDoesNotFitError, resolve

GB = 10**9


@pytest.fixture(autouse=True)
def bare_machine(computer: Computer) -> None:
    """Nothing measured, nothing fetched, no GPU."""


def machine(vram: float, ram: float) -> Site:
    return described_site(vram_bytes=int(vram * GB), ram_bytes=int(ram * GB))


def refused(request: Request, site: Site) -> RequestDoesNotFitError:
    with pytest.raises(RequestDoesNotFitError) as error:
        resolve(request, site)
    return error.value


@pytest.mark.parametrize("vram", [0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 26])
@pytest.mark.parametrize("pair", ["llama2-70b-chat", "llama2-70b-chat-gptq", "llama2-7b-chat"])
def test_every_change_fits(pair: str, vram: int) -> None:
    request, site = Request(model=pair), machine(vram, 12)
    try:
        resolve(request, site)
    except RequestDoesNotFitError as error:
        changes = changes_that_fit(request, site, error.asked.context_tokens)
        for change in changes:
            resolve(change.request, site)
            assert change.settings or change.context_tokens
        assert len({change.settings for change in changes}) == len(changes)


def test_the_largest_draft_of_the_targets_kind_is_named() -> None:
    error = refused(Request(model="llama2-70b-chat"), machine(20, 64))
    assert with_mend(error).endswith(". It fits with --draft llama2-7b-chat-gptq")
    parts = str(error).partition("(")[2].rpartition(")")[0].split(", ")
    told = sum(float(part.split()[-2]) for part in parts)
    assert told == pytest.approx(error.needed_bytes / GB, abs=0.2), "the parts add up"


def test_a_smaller_tree_and_a_shorter_context_are_named_in_this_order() -> None:
    request = Request(model="llama2-70b-chat-gptq", tree=TreeRequest(budget=2048))
    error = refused(request, machine(21, 64))
    said = with_mend(error)
    assert said.index("--budget ") < said.index("--draft ") < said.index("tokens of prompt and")


def test_several_changes_where_one_is_not_enough() -> None:
    error = refused(Request(model="llama2-70b-chat", context_tokens=32768), machine(8, 64))
    (change,) = changes_that_fit(error.asked.request, error.asked.site, 32768)
    assert [name for name, _ in change.settings] == ["budget", "draft"]


def test_a_target_loaded_whole_is_streamed_instead() -> None:
    error = refused(
        Request(model="llama2-7b-chat", offload="none", dtype="bfloat16"), machine(0, 10)
    )
    assert with_mend(error).endswith(". It fits with --offload auto")


def test_nothing_helps() -> None:
    error = refused(Request(model="llama2-70b-chat"), machine(1, 64))
    assert with_mend(error).endswith(". Use a smaller or quantized model")


def test_at_the_command_line() -> None:
    ran = run_cli("plan", "llama2-70b-chat", "--vram", "20", "--ram", "64")
    assert ran.code == OutOfMemoryError.exit_code
    assert ran.error.endswith("It fits with --draft llama2-7b-chat-gptq")
