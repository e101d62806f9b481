"""`specexec generate`: where text goes, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
from cli_runner import breaks_off, run_cli
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

import specexec_cli
from specexec_cli.cli import main
from specexec_cli.config import GenerationConfig
from specexec_cli.errors import SpecexecError
from specexec_cli.planning.request import Request
from specexec_cli.session import open_session

DEMO = Path(specexec_cli.__file__).parent / "demo"
SHORT = ("-m", "demo", "--max-tokens", 4)
CUT = "notice: cut at 4 tokens: --max-tokens 8 allows more\n"


@pytest.fixture(scope="module")
def plain() -> str:
    """What the demo pair says."""
    ran = run_cli("generate", "--raw", "import os\n", *SHORT, "-q")
    assert ran.code == 0
    return ran.out


def test_text_goes_to_stdout_and_nothing_else(plain):
    ran = run_cli("generate", "--raw", "import os\n", *SHORT)
    assert (ran.code, ran.out, ran.err) == (0, plain, CUT)
    assert plain.strip(), "there is text"
    assert plain.endswith("\n")
    assert "\x1b" not in plain


def test_stats_go_to_stderr(plain):
    ran = run_cli("generate", "--raw", "import os\n", *SHORT, "--stats")
    assert ran.out == plain
    assert ran.err.startswith(CUT)
    assert ran.err.count("\n") == 2
    for word in ("tok/s", "tok/pass", "draft", "verify", "peak RAM"):
        assert word in ran.err
    assert "\x1b" not in ran.err


def test_quiet_leaves_errors_alone():
    ran = run_cli("generate", "x", *SHORT, "--stats", "-q")
    assert ran.err == ""
    assert run_cli("generate", "", "-q").error.startswith("the prompt is empty")


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
@pytest.mark.parametrize("offload", ["ssd", "ram", "none"])
def test_methods_and_tiers_say_the_same(plain, method, offload):
    ran = run_cli(
        "generate", "--raw", "import os\n", *SHORT, "--method", method, "--offload", offload
    )
    assert (ran.code, ran.out) == (0, plain)


def test_the_prompt_from_a_file_or_standard_input(plain, tmp_path):
    (tmp_path / "prompt.txt").write_text("import os\n")
    raw = ("generate", "--raw", *SHORT)
    assert run_cli(*raw, "-f", tmp_path / "prompt.txt").out == plain
    assert run_cli(*raw, "-f", "-", stdin=b"import os\n").out == plain
    assert run_cli(*raw, stdin=b"import os\n").out == plain


def test_an_argument_wins_over_a_pipe_nobody_asked_for(plain):
    assert run_cli("generate", "--raw", "import os\n", *SHORT, stdin=b"ignored").out == plain


def test_the_target_alone_decodes_autoregressively(plain):
    ran = run_cli("generate", "--raw", "import os\n", *SHORT, "-m", DEMO / "target",
                  "--method", "autoregressive")  # fmt: skip
    assert (ran.code, ran.out) == (0, plain)


def test_folders_for_target_and_draft(plain):
    ran = run_cli("generate", "--raw", "import os\n", *SHORT, "-m", DEMO / "target",
                  "--draft", DEMO / "draft")  # fmt: skip
    assert (ran.code, ran.out, ran.err) == (0, plain, CUT)


def test_a_draft_larger_than_the_target_is_worth_a_warning(plain):
    swapped = ("-m", DEMO / "draft", "--draft", DEMO / "target")
    ran = run_cli("generate", "--raw", "import os\n", *SHORT, *swapped)
    assert ran.code == 0
    assert ran.err.startswith("notice: the draft model")
    assert "larger than the target" in ran.err
    assert ran.err.count("\n") == 2
    assert ran.err.endswith(CUT)
    assert run_cli("generate", "--raw", "import os\n", *SHORT, *swapped, "-q").err == ""


def test_stop_strings(plain):
    ran = run_cli(
        "generate", "--raw", "import os\n", "--max-tokens", 40, "--stop", "\n", "--stop", "zzz"
    )
    whole = run_cli("generate", "--raw", "import os\n", "--max-tokens", 40)
    assert ran.out == whole.out.partition("\n")[0] + "\n"


def test_a_prompt_is_a_turn_of_a_chat_where_the_model_has_a_template():
    question = ("generate", "What does len do?", *SHORT)
    answer, raw = run_cli(*question), run_cli(*question, "--raw")
    assert answer.code == raw.code == 0
    assert answer.out != raw.out
    with open_session(Request(method="autoregressive")) as session:
        messages = [{"role": "user", "content": "What does len do?"}]
        steps = session.generate(
            session.encode_chat(messages), generation=GenerationConfig(max_tokens=4)
        )
        assert "".join(step.text for step in steps) + "\n" == answer.out


# Mistakes: (arguments, exit code, what the line must say)

MISTAKES = {
    "empty prompt": (["generate", ""], 2, ["prompt is empty"]),
    "two prompts": (["generate", "x", "-f", "y"], 2, ["not both"]),
    "no prompt": (["generate"], 2, ["no prompt", "-f FILE"]),
    "no such file": (["generate", "-f", "nowhere.txt"], 2, ["nowhere.txt", "No such file"]),
    "a folder": (["generate", "-f", "."], 2, ["cannot read the prompt from .", "directory"]),
    "surrogates": (["generate", "caf\udce9"], 2, ["not UTF-8"]),
    "unknown pair": (
        ["generate", "x", "-m", "llama2-7b-caht"],
        3,
        ["no model 'llama2-7b-caht'", "Did you mean", "llama2-7b-chat"],
    ),
    "unknown model": (["generate", "x", "-m", "demo-tarjet"], 3, ["demo-target'?"]),
    "unknown draft": (
        ["generate", "x", "-m", "demo-target", "--draft", "demo-drafd"],
        3,
        ["demo-draft'?"],
    ),
    "no folder": (["generate", "x", "-m", "./nowhere"], 3, ["no file or folder './nowhere'"]),
    "method": (["generate", "x", "--method", "specexc"], 2, ["--method 'specexc'", "'specexec'?"]),
    "offload": (["generate", "x", "--offload", "sdd"], 2, ["--offload 'sdd'", "'ssd'?"]),
    "dtype": (["generate", "x", "--dtype", "fp16"], 2, ["--dtype 'fp16'", "float16"]),
    "scoring": (["generate", "x", "--draft-scoring", "nois"], 2, ["'noise'?"]),
    "policy": (["generate", "x", "--policy", "costs"], 2, ["--policy 'costs'", "'cost'?"]),
    "device": (["generate", "x", "--device", "gpu"], 2, ["--device gpu", "cpu"]),
    "other device": (["generate", "x", "--device", "mps"], 2, ["--device mps", "cpu"]),
    "cuda 77": (["generate", "x", "--device", "cuda:77"], 2, ["--device cuda:77"]),
    "max-tokens": (["generate", "x", "--max-tokens", "0"], 2, ["max-tokens", "not 0"]),
    "temperature": (["generate", "x", "--temperature", "-0.1"], 2, ["temperature", "-0.1"]),
    "temperature nan": (["generate", "x", "--temperature", "nan"], 2, ["temperature", "nan"]),
    "top-p": (["generate", "x", "--top-p", "1.5"], 2, ["top-p", "1.5"]),
    "top-p 0": (["generate", "x", "--top-p", "0"], 2, ["top-p"]),
    "top-k": (["generate", "x", "--top-k", "-1"], 2, ["top-k", "-1"]),
    "min-p": (["generate", "x", "--min-p", "2"], 2, ["min-p"]),
    "penalty": (["generate", "x", "--repetition-penalty", "0"], 2, ["repetition-penalty"]),
    "seed": (["generate", "x", "--seed", "-1"], 2, ["seed", "-1"]),
    "seed 2^64": (["generate", "x", "--seed", str(2**64)], 2, ["seed"]),
    "budget": (["generate", "x", "--budget", "0"], 2, ["--budget", "not 0"]),
    "depth": (["generate", "x", "--depth", "0"], 2, ["--depth", "not 0"]),
    "batch": (["generate", "x", "--batch", "-3"], 2, ["--batch", "-3"]),
    "depth over budget": (
        ["generate", "x", "--budget", "4", "--depth", "5"],
        2,
        ["--depth (5) cannot exceed --budget (4)"],
    ),
    "empty stop": (["generate", "x", "--stop", ""], 2, ["--stop"]),
    "no number": (["generate", "x", "--max-tokens", "ten"], 2, ["--max-tokens", "'ten'"]),
    "no such option": (["generate", "x", "--max-token", "1"], 2, ["--max-tokens"]),
    "an option without value": (["generate", "x", "--seed"], 2, ["--seed", "requires"]),
    "two arguments": (["generate", "x", "y"], 2, ["y"]),
    "no such command": (["generat", "x"], 2, ["generat"]),
    "models file": (["generate", "x", "--models-file", "no.toml"], 2, ["no.toml"]),
    "tokenizer": (["generate", "x", "--tokenizer", "nowhere"], 5, ["nowhere", "no tokenizer"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_its_exit_code(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv, code, words = MISTAKES[name]
    ran = run_cli(*argv)
    assert (ran.code, ran.out) == (code, "")
    for word in words:
        assert word in ran.error


def test_a_message_that_lacks_what_was_typed_tells_it(monkeypatch, capsys):
    def refuse(**_):  # as typer does from 0.29 on
        try:
            TypeAdapter(int).validate_python("ten")
        except ValidationError as cause:
            raise typer.BadParameter("Input should be a valid integer") from cause

    monkeypatch.setattr(main, "app", refuse)
    assert main._run() == 2
    told = "Input should be a valid integer, not 'ten'. See specexec --help"
    assert capsys.readouterr().err == f"error: Invalid value: {told}\n"


def test_a_prompt_file_that_is_not_utf8(tmp_path):
    (tmp_path / "latin1.txt").write_bytes("abc café".encode("latin-1"))
    error = run_cli("generate", "-f", tmp_path / "latin1.txt").error
    assert "latin1.txt is not UTF-8 text (byte 7 is 0xe9)" in error
    assert "standard input is not UTF-8" in run_cli("generate", stdin=b"\xff").error


def test_a_prompt_beyond_the_context_window():
    ran = run_cli("generate", stdin=b"x = 1 + 2\n" * 4000)
    assert ran.code == 2
    assert "tokens, the context window holds 4096" in ran.error


def test_a_limit_that_ended_the_text_is_named(tmp_path):
    config = byte_llama(max_position_embeddings=32, eos_token_id=None)
    save_checkpoint(tmp_path, config, std=0.12)
    save_byte_tokenizer(tmp_path)
    asked = ("generate", "abc", "-m", tmp_path, "--method", "autoregressive", "--max-tokens")
    window = "notice: cut where the context window (32 tokens) is full, before --max-tokens 64: "
    assert run_cli(*asked, 64).err.startswith(window)
    assert run_cli(*asked, 4).err == CUT
    assert run_cli(*asked, 4, "-q").err == ""


def test_no_standard_input_at_all(monkeypatch):
    """A program started with its input closed has sys.stdin None."""
    import sys

    from specexec_cli.cli.generate import read_prompt
    from specexec_cli.errors import ConfigError

    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompt(None, None)
    with pytest.raises(ConfigError, match="standard input"):
        read_prompt(None, "-")


def test_ctrl_c_while_loading(monkeypatch):
    def interrupted(*request, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("specexec_cli.session.open_session", interrupted)
    ran = run_cli("generate", "x")
    assert (ran.code, ran.out, ran.err) == (130, "", "")


def test_ctrl_c_keeps_the_text_so_far(plain, monkeypatch):
    breaks_off(monkeypatch, KeyboardInterrupt)
    ran = run_cli(
        "generate", "--raw", "import os\n", "--max-tokens", 40, "--method", "autoregressive"
    )
    assert ran.code == 130
    assert ran.err == ""
    assert ran.out.strip("\n")
    assert plain.startswith(ran.out.strip("\n"))


def test_an_error_in_the_middle_keeps_the_text_so_far(plain, monkeypatch):
    class Broken(SpecexecError):
        exit_code = 7

    breaks_off(monkeypatch, Broken("cannot read"))
    ran = run_cli(
        "generate", "--raw", "import os\n", "--max-tokens", 40, "--method", "autoregressive"
    )
    assert (ran.code, ran.error) == (7, "cannot read")
    assert plain.startswith(ran.out.strip("\n"))


def test_tokenizers_that_disagree(tmp_path):
    """Ids 300 and 301 swapped in the draft's tokenizer."""
    import json
    import shutil

    shutil.copytree(DEMO / "draft", tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == index) for index in (300, 301))
    vocab[first], vocab[second] = 301, 300
    path.write_text(json.dumps(content))
    ran = run_cli("generate", "x", "-m", "demo-target", "--draft", tmp_path / "draft")
    assert ran.code == 4
    assert "2 of 4096 token ids differ, the first is id 300" in ran.error


def test_a_base_model_has_no_chat(tmp_path):
    import shutil

    from checkpoints import edit_json

    shutil.copytree(DEMO / "target", tmp_path / "base")
    edit_json(tmp_path / "base" / "tokenizer_config.json", chat_template=None)
    asked = ("generate", "x", "-m", tmp_path / "base", "--method", "autoregressive",
             "--max-tokens", 4)  # fmt: skip
    assert run_cli(*asked).out == run_cli(*asked, "--raw").out
    for option in (("--system", "Be short"), ("--no-think",)):
        ran = run_cli(*asked, *option)
        assert ran.code == 2
        assert "has no chat template" in ran.error
    assert "no place for --system" in run_cli(*asked, "--raw", "--system", "Be short").error


def test_non_finite_logits(tmp_path):
    import shutil

    shutil.copytree(DEMO / "target", tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "target" / "model.safetensors")
    ran = run_cli("generate", "x", "-m", tmp_path / "target", "--draft", "demo-draft")
    assert ran.code == 8
    assert "are not finite" in ran.error
