"""The examples in CONTRIBUTING.md work when they are carried out, and README's lists are right."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import (
    architecture,
    chain_logits,
    open_float32,
    random_tokens,
    random_tree,
    save_checkpoint,
)
from quantized_checkpoints import edit_quantization, save_quantized
from row_checkpoints import save_packed_by
from specexec_kernels import formats
from specexec_kernels.cpu_matmul_plan import reads
from specexec_kernels.formats.base import PackedWeight
from transformers.models.llama.modeling_llama import LlamaAttention

from specexec_cli.catalog import architectures, packed_formats
from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.policies import POLICIES, registry
from specexec_cli.drafting.sources import registry as sources
from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.lab.baselines import SOURCES, policies_for
from specexec_cli.models.layer_states import LAYER_STATES
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.session import Session, TextSession
from specexec_cli.verify.verifier import LocalTarget

ROOT = Path(__file__).parents[2]


def example(name: str) -> str:
    """The Python code below a marker in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"CONTRIBUTING.md has no example '{name}'"
    return found[1]


@pytest.fixture(autouse=True)
def own_tables() -> Iterator[None]:
    """Every registry is after a test as it was before."""
    tables: list[dict[str, Any]] = [
        architectures._table, registry._table, sources._table, packed_formats._table,
        formats._table, LAYER_STATES,
    ]  # fmt: skip
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def added_by(name: str, table: Mapping[str, Any]) -> str:
    """Carries out an example; the name of the one entry that the table has more."""
    before = set(table)
    exec(compile(example(name), "CONTRIBUTING.md", "exec"), {})
    (added,) = set(table) - before
    return added


@torch.no_grad()
def test_the_example_of_an_architecture(tmp_path: Path) -> None:
    architectures._table.pop("granite")  # it is there by now, and comes back after the test
    added = added_by("architecture", architectures.ARCHITECTURES)
    config = transformers.AutoConfig.for_model(
        added, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    own, tokens = save_checkpoint(tmp_path, config), random_tokens(20)
    model = open_float32(tmp_path)
    expected = own(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(chain_logits(model, tokens), expected, rtol=1e-4, atol=1e-4)
    model.close()
    sizes = checkpoint_bytes(read_checkpoint(tmp_path))
    assert sum(sizes.layers) == 4 * sizes.layer_params


def test_the_example_of_a_policy() -> None:
    name = added_by("policy", POLICIES)
    assert policies_for("specexec") == ("fixed", name, "heuristic", "disco", "cost")
    assert policies_for("beam") == ("fixed", name, "heuristic", "disco")
    assert name not in policies_for("chain")
    with Session.open(model="demo", device="cpu") as session:
        plain = tokens_of(session, method="autoregressive")
        tree = TreeConfig(budget=12, max_depth=4, batch=4, policy=name)
        found: list[StepResult] = []
        assert tokens_of(session, steps=found, tree=tree) == plain
        assert max(step.tree_nodes for step in found) == 6
        with pytest.raises(ConfigError, match="cannot size the trees of method chain: use fixed"):
            session.generate("x", tree=tree, method="chain")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages that has the examples as files, and nothing else that is new."""
    folder = tmp_path_factory.mktemp("house")
    for package in ("specexec_cli", "kernels/specexec_kernels"):
        copy = folder / Path(package).name
        shutil.copytree(ROOT / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "models.toml", folder)
    for name, file in {
        "policy": "specexec_cli/drafting/policies/half.py",
        "draft source": "specexec_cli/drafting/sources/lookup.py",
        "layer state": "specexec_cli/models/layer_states/running_sum.py",
        "row-packed weights": "specexec_kernels/formats/shift8.py",
    }.items():
        (folder / file).write_text(example(name))
    return folder


def run_in(house: Path, code: str) -> str:
    """What a program prints that imports the copy, which is gone before lines are counted."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=house,
        env={**environ, "PYTHONPATH": str(house)},
    )  # fmt: skip
    return done.stdout


def test_help_shows_the_example_of_a_policy(house: Path) -> None:
    shown = run_in(
        house,
        "from typer.testing import CliRunner\n"
        "from specexec_cli.cli.main import app\n"
        "for command in ('generate', 'bench'):\n"
        "    asked = [command, '--help-all']\n"
        "    print(CliRunner().invoke(app, asked, env={'COLUMNS': '900'}).output)\n"
        "print(CliRunner().invoke(app, ['generate', 'x', '--policy', 'hal']).exception)\n",
    )
    assert "fixed (all of it), half (half of it), heuristic (deeper after" in shown
    assert "fixed, half, heuristic, disco, cost: how much of the budget a tree uses" in shown
    assert "not one of auto, fixed, half, heuristic, disco, cost. Did you mean" in shown


def test_the_examples_of_a_layer_state_and_a_format_are_found(house: Path) -> None:
    found = run_in(
        house,
        "from specexec_cli.models.layer_states import LAYER_STATES\n"
        "from specexec_kernels.formats import METHODS\n"
        "print(LAYER_STATES, *METHODS)\n",
    )
    assert "'compressed_sparse_attention': <class 'specexec_cli.models.layer_states.r" in found
    assert found.endswith(" bitsandbytes mxfp4 shift8\n")


@pytest.mark.parametrize("broken", [False, True])
def test_the_example_of_a_command(tmp_path: Path, broken: bool) -> None:
    """A package that is installed beside specexec: its module and its entry point."""
    code = example("command")
    (tmp_path / "others.py").write_text("import nothing_of_that_name" if broken else code)
    installed = tmp_path / "others-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    points = "targets = others:targets\ngenerate = others:targets\n"
    (installed / "entry_points.txt").write_text(f"[specexec.commands]\n{points}")

    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"

    def specexec(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "specexec_cli.cli.main", *arguments], capture_output=True,
            text=True, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip

    done = specexec("targets", "demo")
    if broken:
        assert done.returncode == 2
        assert "error: the command 'targets' of others cannot be imported" in done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert "demo-target" in done.stdout.split()
    assert "Answer a prompt" in specexec("generate", "--help").stdout, "the name is taken"


def test_the_example_of_a_draft_source() -> None:
    name = added_by("draft source", SOURCES)
    assert policies_for(name) == ("fixed", "heuristic"), "those that suit whatever drafts"
    with Session.open(model="demo", device="cpu") as session:
        plain = tokens_of(session, method="autoregressive")
        tree = TreeConfig(budget=6, max_depth=6)
        found: list[StepResult] = []
        assert tokens_of(session, steps=found, tree=tree, method=name) == plain
        assert tokens_of(session, tree=tree, method=name) == plain, "a second text"
        assert sum(sum(step.drafted) for step in found) > 0
        with pytest.raises(ConfigError, match=f"cannot size the trees of method {name}: use fixed"):
            session.generate("x", tree=replace(tree, policy="cost"), method=name)


@torch.no_grad()
def test_the_example_of_a_layer_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's logits are those of its path alone, and so is what follows a commit and a crop."""
    kind, attend = added_by("layer state", LAYER_STATES), LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, **told: Any) -> Any:
        if self.layer_idx != 1:
            return attend(self, hidden_states, **told)
        sums = told["past_key_values"].layers[1].run(self.q_proj(hidden_states))
        return self.o_proj(torch.tanh(sums)), None

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    config = architecture("llama")
    config.layer_types = ["full_attention", kind, "full_attention"]
    save_checkpoint(tmp_path, config)
    model, text, tree = open_float32(tmp_path), random_tokens(9), random_tree(12, seed=1)
    target, alone = LocalTarget(model), LocalTarget(model)
    logits = target.verify(text, tree)
    paths: list[tuple[int, ...]] = [()]  # of the root and of each node
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))
    for found, path in zip(logits, paths, strict=True):
        assert torch.equal(found, read_anew(alone, [*text, *path]))
    node = int(tree.parents.max())
    accepted = [node]
    while (parent := int(tree.parents[accepted[0]])) >= 0:
        accepted.insert(0, parent)
    target.commit(accepted)
    target.crop(len(text))
    behind = target.verify([5], DraftTree.empty())[-1]
    assert torch.equal(behind, read_anew(alone, [*text, 5]))
    model.close()


def read_anew(target: LocalTarget, tokens: list[int]) -> torch.Tensor:
    """The logits behind a text."""
    target.crop(0)
    return target.verify(tokens, DraftTree.empty())[-1]


def test_bench_measures_the_example_of_a_draft_source(house: Path, tmp_path: Path) -> None:
    code = (
        "from typer.testing import CliRunner\n"
        "from specexec_cli.cli.main import app\n"
        "print(CliRunner().invoke(app, ['bench', '--help'], env={'COLUMNS': '900'}).output)\n"
        f"done = CliRunner().invoke(app, ['bench', '--method', 'lookup', '--max-tokens', '12',"
        f" '--prompts', '1', '--speculation-length', '4', '--results', {str(tmp_path / 'b')!r},"
        " '--device', 'cpu', '--quiet'])\n"
        "print('RESULT', done.output, done.exception)\n"
    )
    shown, _, result = run_in(house, code).partition("RESULT")
    assert re.search(r"specinfer, beam, beam-pruned, .*lookup, dsi", shown)
    assert "lookup 4" in result, result


@torch.no_grad()
def test_the_example_of_packed_weights(tmp_path: Path) -> None:
    plain, packed = save_quantized(tmp_path)
    keys = {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_gptq"}
    edit_quantization(packed, **keys, checkpoint_format=None, desc_act=None)
    with pytest.raises(CheckpointError, match="'intel/auto-round' is not supported"):
        open_float32(packed)
    assert added_by("packed weights", packed_formats.PACKED_KINDS) == "intel/auto-round"
    models = open_float32(plain), open_float32(packed)
    tokens = random_tokens(20)
    expected, found = (chain_logits(model, tokens) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for model in models:
        model.close()
    edit_quantization(packed, packing_format="auto_round:auto_awq")
    with pytest.raises(
        CheckpointError, match="intel/auto-round format 'auto_round:auto_awq' is not"
    ):
        open_float32(packed)


def tokens_of(session: TextSession, steps: list[StepResult] | None = None, **how: Any) -> list[int]:
    found = [] if steps is None else steps
    found += session.generate(
        "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n\n\ndef h(x):",
        sampling=SamplingConfig(temperature=0.7, seed=3),
        generation=GenerationConfig(max_tokens=48),
        **how,
    )
    return [token for step in found for token in step.tokens]


def test_readme_names_architectures_that_run() -> None:
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2]
    listed = limits.partition("Architectures:")[2].partition("Others are")[0]
    titles = {entry.title for entry in architectures.ARCHITECTURES.values()}
    names = " ".join(listed.partition("among them")[2].split()).rstrip(". ")
    named = [name.strip() for name in names.split(",")]
    assert len(named) > 20
    assert not set(named) - titles


def test_the_example_of_row_packed_weights(tmp_path: Path) -> None:
    name = added_by("row-packed weights", formats.METHODS)

    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        exponents = torch.ceil(torch.log2(weight.abs().amax(1) / 127))
        codes = torch.round(weight / torch.exp2(exponents)[:, None])
        return {"weight": codes.to(torch.int8), "exponent": (exponents + 127).byte()}

    plain, packed = save_packed_by(tmp_path, pack, {"quant_method": name})
    logits = []
    for folder in (plain, packed):
        model = open_float32(folder)
        logits.append(chain_logits(model, [1, 5, 9, 3]))
    linear = model.skeleton.layers[0].layer.get_submodule("mlp.up_proj")
    assert reads(PackedWeight(linear.format, 64, 96, {}))
    model.close()
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5 * float(logits[0].abs().max()))
