"""Quantized copies of checkpoints: what they compute, and what is left where making one fails."""

from __future__ import annotations

import json
import resource
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import (
    architecture,
    byte_llama,
    chain_logits,
    edit_json,
    open_float32,
    random_tokens,
    save_byte_tokenizer,
    save_checkpoint,
)
from cli_runner import run_cli
from safetensors.torch import load_file, save_file
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import BITS
from torch import Tensor
from transformers import PretrainedConfig

from specexec_cli.errors import CheckpointError, ConfigError, NotFetchedError, OutOfMemoryError
from specexec_cli.models import quantize
from specexec_cli.models.calibration_text import run_calibration, standard_pieces
from specexec_cli.models.quantize import layers_there, plan_quantization, write_quantized
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import architecture_bytes, checkpoint_bytes

GROUP = 16


def _config(name: str = "llama") -> PretrainedConfig:
    """Sizes that 3 bits pack too."""
    config = architecture(name)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    config.moe_intermediate_size = config.shared_expert_intermediate_size = 32
    return config


def _dequantized(folder: Path, bits: int) -> dict[str, Tensor]:
    """The checkpoint's tensors with packed weights made plain, by the reference alone."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in [each for each in tensors if each.endswith(".qweight")]:
        linear = name.removesuffix(".qweight")
        packed = {
            leaf: tensors.pop(f"{linear}.{leaf}")
            for leaf in ("qweight", "qzeros", "scales", "g_idx")
        }
        fmt = Gptq(bits, GROUP, shuffled=True)
        inputs, outputs = len(packed["g_idx"]), packed["scales"].shape[1]
        tensors[f"{linear}.weight"] = PackedWeight(fmt, inputs, outputs, packed).unpack()
    return tensors


@pytest.mark.parametrize(
    ("name", "bits"),
    [*(("llama", bits) for bits in BITS), ("llama-biases", 4), ("mixtral", 4), ("qwen3-moe", 4)],
)
def test_it_computes_what_transformers_computes_with_the_dequantized_weights(
    tmp_path: Path, name: str, bits: int
) -> None:
    save_checkpoint(tmp_path / "plain", _config(name), std=0.1)
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), bits, GROUP)
    write_quantized(plan, tmp_path / "packed", shard_bytes=60_000)
    # transformers reads the same weights, unpacked, from a folder of their own
    (tmp_path / "unpacked").mkdir()
    save_file(_dequantized(tmp_path / "packed", bits), tmp_path / "unpacked" / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "unpacked")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "unpacked", dtype=torch.float32
    ).eval()
    tokens = random_tokens(12)

    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    packed = open_float32(tmp_path / "packed")

    torch.testing.assert_close(chain_logits(packed, tokens), expected, rtol=0, atol=2e-4)
    assert (tmp_path / "packed" / "model.safetensors.index.json").is_file()
    packed.close()


@pytest.mark.parametrize("by_residual", [False, True])
def test_a_text_s_moments_weigh_rows_alike_or_by_what_the_next_norm_makes_of_them(
    by_residual: bool, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, _config(), std=0.1)
    pieces = [random_tokens(20), random_tokens(20)[::-1]]
    found: list[dict[str, Tensor]] = []
    run_calibration(
        read_checkpoint(tmp_path),
        pieces,
        lambda index, moments: found.append(dict(moments)),
        by_residual=by_residual,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def watch(module: object, args: tuple[Tensor, ...], name: str = name) -> None:
                inputs[f"model.{name}.weight"] = args[0][0]

            module.register_forward_pre_hook(watch)
    behind: dict[str, Tensor] = {}
    for index, layer in enumerate(model.model.layers):

        def see(module: object, args: object, output: Tensor, index: int = index) -> None:
            behind[f".{index}."] = output.reshape(-1, output.shape[-1])

        layer.register_forward_hook(see)
    with torch.no_grad():
        for piece in pieces:
            model(torch.tensor([piece]))
            for name, rows in inputs.items():
                residual = next(rows for part, rows in behind.items() if part in name)
                weights = 1.0 / (residual.square().mean(-1, keepdim=True) + 1e-6)
                if not by_residual:
                    weights = torch.ones_like(weights)
                expected[name] = expected.get(name, torch.zeros(())) + rows.T @ (weights * rows)

    assert [sorted(each) for each in found] == [
        sorted(name for name in expected if f".{index}." in name) for index in range(len(found))
    ]
    for each in found:
        for name, moments in each.items():
            torch.testing.assert_close(moments, expected[name], rtol=1e-3, atol=1e-2)


def test_a_calibrated_copy_is_nearer_on_its_text(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", _config(), std=0.1)
    source = read_checkpoint(tmp_path / "plain")
    plain = open_float32(tmp_path / "plain")
    pieces = [random_tokens(64, seed) for seed in range(12)]
    errors = []
    for name, text in (("fitted", ()), ("calibrated", pieces)):
        write_quantized(plan_quantization(source, 3, GROUP), tmp_path / name, pieces=text)
        packed = open_float32(tmp_path / name)
        errors.append(sum(
            float((chain_logits(packed, piece) - chain_logits(plain, piece)).square().mean())
            for piece in pieces
        ))  # fmt: skip
        packed.close()
    plain.close()
    assert errors[1] < 0.9 * errors[0]
    shapes = [
        {name: (tensor.dtype, tensor.shape) for name, tensor in
         load_file(tmp_path / folder / "model.safetensors").items()}
        for folder in ("fitted", "calibrated")
    ]  # fmt: skip
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2"])
def test_experts_and_other_layers_take_a_text_too(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "plain", _config(name), std=0.1)
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), 4, GROUP)
    write_quantized(plan, tmp_path / "packed", pieces=[random_tokens(40)])
    packed = open_float32(tmp_path / "packed")
    assert torch.isfinite(chain_logits(packed, random_tokens(9))).all()
    packed.close()


def test_memory_that_ends_in_a_calibration_is_told_with_what_helps_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    save_checkpoint(source, _config())

    def ends(*args: object) -> None:
        raise OutOfMemoryError("RAM is too small: use a smaller draft tree (`budget`)")

    monkeypatch.setattr(quantize, "run_calibration", ends)
    plan = plan_quantization(read_checkpoint(source), 4, GROUP)
    with pytest.raises(OutOfMemoryError) as found:
        write_quantized(plan, tmp_path / "out", pieces=[[1, 2], [3]])
    assert "while 3 tokens of calibration text went through source" in str(found.value)
    assert str(found.value).endswith("(`specexec quantize --calibration none`)")
    assert [each.name for each in tmp_path.iterdir()] == ["source"], "nothing half-made is left"


def test_a_calibration_text_that_is_none_is_one_line(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64, intermediate_size=96))
    save_byte_tokenizer(tmp_path / "plain")
    text = tmp_path / "text"
    command = ("quantize", tmp_path / "plain", "--out", tmp_path / "out", "--group-size", GROUP,
               "--calibration", text)  # fmt: skip
    ran = run_cli(*command)
    assert (ran.code, f"cannot read the calibration text {text}: No such file" in ran.error) == (
        2, True,
    )  # fmt: skip
    text.write_bytes(b"\xff" * 600)
    assert "it is not UTF-8 text" in run_cli(*command).error
    text.write_text("word " * 9)
    assert "has less than the 512 tokens that are needed" in run_cli(*command).error
    assert not (tmp_path / "out").exists()
    text.write_text("words of a text, " * 99)
    assert run_cli(*command).code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_without_a_word_errors_are_kept_low_on_python_s_standard_library(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    save_checkpoint(plain, byte_llama(hidden_size=64, intermediate_size=96, num_hidden_layers=1))
    save_byte_tokenizer(plain)
    plan = plan_quantization(read_checkpoint(plain), 4, GROUP)
    for said, pieces in (([], standard_pieces(load_tokenizer(plain))),
                         (["--calibration", "none"], [])):  # fmt: skip
        out, expected = (tmp_path / f"{name}-{len(said)}" for name in ("out", "expected"))
        assert run_cli("quantize", plain, "--out", out, "--group-size", GROUP, *said).code == 0
        write_quantized(plan, expected, pieces=pieces)
        ours, theirs = (load_file(each / "model.safetensors") for each in (out, expected))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    first, second = (load_file(tmp_path / f"out-{n}" / "model.safetensors") for n in (0, 2))
    assert not all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_without_the_standard_library_another_text_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64, num_hidden_layers=1))
    save_byte_tokenizer(tmp_path / "plain")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    ran = run_cli("quantize", tmp_path / "plain", "--out", tmp_path / "out", "--group-size", GROUP)
    assert (ran.code, ran.error.endswith("or none, --calibration none")) == (2, True)


def test_what_is_not_a_linear_of_a_layer_is_copied(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", _config("qwen2-moe"), dtype=torch.bfloat16)
    save_byte_tokenizer(tmp_path / "plain")
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), 4, GROUP)
    write_quantized(plan, tmp_path / "packed")

    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    same = plain.keys() & packed.keys()
    assert {name for name in plain if "norm" in name or "embed" in name or "gate." in name} <= same
    assert "lm_head.weight" in same
    assert all(torch.equal(plain[name], packed[name]) for name in same)
    assert not any(name.endswith("proj.weight") for name in same)
    tokenizer = "tokenizer.json"
    assert (tmp_path / "packed" / tokenizer).read_bytes() == (
        tmp_path / "plain" / tokenizer
    ).read_bytes()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    stored = json.loads((tmp_path / "packed" / "quantize_config.json").read_text())
    assert config["quantization_config"] == stored
    # GPTQModel goes by the config: a linear that stays plain is excluded there
    assert list(stored["dynamic"]) == [r"-:model\.layers\.\d+\.mlp\.shared_expert_gate$"]


def test_its_size_is_known_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", _config())
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), 4, GROUP)
    told = architecture_bytes({**plan.source.config, "quantization_config": plan.config()})
    write_quantized(plan, tmp_path / "packed")

    made = read_checkpoint(tmp_path / "packed")
    assert checkpoint_bytes(made).total == told.total == plan.n_bytes == made.total_bytes


def test_nothing_is_left_of_a_copy_that_fails_at_any_tensor(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64, num_hidden_layers=1))
    checkpoint = read_checkpoint(tmp_path / "plain")
    plan = plan_quantization(checkpoint, 4, GROUP)
    for failing in range(len(checkpoint)):
        calls = iter(range(len(checkpoint)))

        def progress(done: int, total: int, calls=calls, failing=failing) -> None:
            if next(calls) == failing:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_quantized(plan, tmp_path / "packed", progress)
        assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_copy_that_ends_before_its_last_file_keeps_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64))
    save_byte_tokenizer(tmp_path / "plain")
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), 4, GROUP)

    def interrupted(*paths: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_quantized(plan, tmp_path / "packed", stays=True)
    (left,) = tmp_path.glob("packed.partial-*")
    assert layers_there(plan, left, (), False) == len(plan.layers)
    write_quantized(plan, tmp_path / "packed", left=left)
    write_quantized(plan, tmp_path / "again")
    found, again = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("packed", "again")
    )
    assert found == again


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64))
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), 4, GROUP)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(NotFetchedError, match=r"cannot be written .*make room"):
            write_quantized(plan, tmp_path / "packed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_mistakes_are_one_line_each(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    save_checkpoint(plain, _config())
    with pytest.raises(ConfigError, match="no whole number of groups of 48"):
        plan_quantization(read_checkpoint(plain), 4, 48)
    out = tmp_path / "out"
    assert run_cli("quantize", plain, "--out", plain).error.endswith(
        "exists: give another folder, or remove it first"
    )
    refused = run_cli("quantize", plain, "--out", out, "--bits", 5)
    assert (refused.code, refused.error) == (2, "--bits 5 is not one of 2, 3, 4, 8")
    no_words = run_cli("quantize", plain, "--out", out, "--group-size", GROUP)
    assert "no tokenizer that can be read, which a calibration text needs" in no_words.error
    assert not out.exists()
    made = run_cli("quantize", plain, "--out", out, "--group-size", GROUP, "--calibration", "none")
    assert made.code == 0
    assert "21 linears in 4 bits" in made.err
    again = run_cli("quantize", out, "--out", tmp_path / "again")
    assert (again.code, "is quantized already" in again.error) == (CheckpointError.exit_code, True)
    edit_json(plain / "config.json", model_type="nobody-knows")
    unknown = run_cli("quantize", plain, "--out", tmp_path / "again")
    assert (unknown.code, "nobody-knows" in unknown.error) == (CheckpointError.exit_code, True)
    assert not (tmp_path / "again").exists()
