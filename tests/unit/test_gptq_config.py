"""GPTQ settings in config files: synonyms, rules, contradictions, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specexec_cli.errors import CheckpointError
from specexec_cli.models.gptq_config import QuantConfig

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def parse(folder: Path, keys: Any = None, notices: list[str] | None = None) -> QuantConfig | None:
    config = {} if keys is None else {"quantization_config": keys}
    told: list[str] = [] if notices is None else notices
    found = QuantConfig.from_checkpoint(folder, config, told.append)
    assert notices is not None or not told
    return found


def parsed(folder: Path, **changes: Any) -> QuantConfig:
    found = parse(folder, {k: v for k, v in {**GPTQ, **changes}.items() if v is not None})
    assert found is not None
    return found


def test_plain_checkpoint(tmp_path: Path) -> None:
    assert parse(tmp_path) is None


def test_every_key(tmp_path: Path) -> None:
    spec = parsed(tmp_path, bits=3, group_size=-1, desc_act=True, sym=False,
                  checkpoint_format="gptq_v2").spec  # fmt: skip
    assert (spec.method, spec.bits, spec.group_size) == ("gptq", 3, -1)
    assert (spec.desc_act, spec.sym, spec.v2) == (True, False, True)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_files_beside_config_json(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(GPTQ))
    found = parse(tmp_path)
    assert found is not None
    assert found.source == tmp_path / name
    assert found.spec.bits == 4


def test_autoawq_synonyms(tmp_path: Path) -> None:
    keys = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(keys))
    found = parse(tmp_path)
    assert found is not None
    spec = found.spec
    assert (spec.method, spec.bits, spec.group_size, spec.sym) == ("awq", 4, 64, False)


def test_wbits_and_old_gptq_without_method(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text('{"wbits": 8, "group_size": 32}')
    found = parse(tmp_path)
    assert found is not None
    assert (found.spec.method, found.spec.bits, found.spec.sym) == ("gptq", 8, None)


def test_disagreement_is_told_and_config_json_believed(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps({**GPTQ, "group_size": 32}))
    notices: list[str] = []
    found = parse(tmp_path, GPTQ, notices)
    assert found is not None
    assert found.spec.group_size == 128
    assert len(notices) == 1
    assert "group_size 128 and 32" in notices[0]


def test_agreement_is_silent(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    notices: list[str] = []
    parse(tmp_path, GPTQ, notices)
    assert notices == []


def test_dynamic_rules(tmp_path: Path) -> None:
    rules = {
        r"-:.*\.k_proj": {},
        r"+:model\.layers\.[01]\..*": {"bits": 8, "group_size": 32},
        r".*down": {"bits": 2},
    }
    config = parsed(tmp_path, dynamic=rules)
    assert config.for_module("model.layers.0.self_attn.k_proj") is None
    special = config.for_module("model.layers.1.mlp.down_proj")
    assert special is not None
    assert (special.bits, special.group_size) == (8, 32)
    later = config.for_module("model.layers.2.mlp.down_proj")
    assert later is not None
    assert (later.bits, later.group_size) == (2, 128)
    assert config.for_module("model.layers.2.mlp.up_proj") == config.spec


def test_a_rule_that_would_backtrack_for_ever(tmp_path: Path) -> None:
    config = parsed(tmp_path, dynamic={"-:(a+)+$": {}, "+:(?:.*)*q_proj": {"bits": 8}})
    assert config.for_module("a" * 40 + "!") == config.spec
    special = config.for_module("model.layers.0.self_attn.q_proj")
    assert special is not None
    assert special.bits == 8
    with pytest.raises(CheckpointError, match="longer than any module"):
        config.for_module("a" * 2000)


def test_rules_of_autoround(tmp_path: Path) -> None:
    names = {"model.layers.0.a": {"bits": 8}, "lm_head": {"bits": 16}, r".*\.b": {"bits": 2}}
    config = parsed(tmp_path, extra_config={r".*\.a": {"bits": 2}, **names})
    for name, bits in (("model.layers.0.a", 8), ("model.layers.1.a", 2), ("layers.0.b", 2)):
        spec = config.for_module(name)
        assert spec is not None
        assert spec.bits == bits
    assert config.for_module("lm_head") is None
    assert config.for_module("model.layers.0.a.more") == config.spec


def test_awq_modules_not_converted(tmp_path: Path) -> None:
    config = parsed(tmp_path, quant_method="awq", modules_to_not_convert=["mlp.gate"])
    assert config.for_module("model.layers.0.mlp.gate") is None
    assert config.for_module("model.layers.0.self_attn.q_proj") == config.spec


@pytest.mark.parametrize(
    ("quantizer", "lossless"),
    [
        (["gptqmodel:0.9.0"], True), ("gptqmodel:7.7.0", True), (["gptqmodel:0.8.1"], False),
        (["optimum:1.20.0"], False), (["optimum:1.2", "gptqmodel:1.0"], True), (None, False),
        ("gptqmodel:0.10.0-dev1", True), ("gptqmodel", False), (5, False), ({"a": 1}, False),
        ("gptqmodel:0." + "1" * 5000, True),
    ],
)  # fmt: skip
def test_who_wrote_it(quantizer: object, lossless: bool, tmp_path: Path) -> None:
    assert parsed(tmp_path, meta={"quantizer": quantizer}).lossless_v1 is lossless


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_format": "gptq_p"}, "format 'gptq_p'"),
        ({"checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"is_marlin_format": True}, "format 'marlin'"),
        ({"format": "bitblas"}, "format 'bitblas'"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"quant_method": "exl2"}, "method 'exl2'"),
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes'"),
        ({"quant_method": "fp8"}, "method 'fp8'"),
        ({"quant_method": "compressed-tensors"}, "method 'compressed-tensors'"),
        ({"quant_method": "awq", "version": "gemv"}, "format 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"),
        ({"bits": 5}, "gptq with 5 bits"),
        ({"bits": "4"}, "whole number"),
        ({"bits": None}, "no 'bits'"),
        ({"group_size": 0}, "group_size"),
        ({"dynamic": ["x"]}, "must map patterns"),
        ({"dynamic": {"+:(": {}}}, "no regex"),
        ({"dynamic": {".*": 5}}, "must map patterns"),
        ({"modules_to_not_convert": 5}, "'modules_to_not_convert' must be a list of names, not 5"),
        ({"modules_to_not_convert": [5]}, "must be a list of names"),
        ({"sym": "x"}, "sym must be true or false"),
        ({"extra_config": {"lm_head": 8}}, "must map names"),
        ({"extra_config": {"(": {}}}, "extra_config rule .* is no regex"),
        ({"quant_method": "hqq"}, "'hqq' is not supported: its zero points are fractions"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "auto-round format 'auto_round:llm_compressor' .* auto_round:auto_awq;",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round", "data_type": "mx_int"},
            "auto-round weights of data_type 'mx_int'",
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(tmp_path, **changes)


def test_override_that_cannot_be_read(tmp_path: Path) -> None:
    config = parsed(tmp_path, dynamic={"+:.*": {"bits": 7}})
    with pytest.raises(CheckpointError, match="7 bits"):
        config.for_module("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("deep", [False, True])
def test_broken_file(tmp_path: Path, deep: bool) -> None:
    (tmp_path / "quantize_config.json").write_text("{" if not deep else "[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        parse(tmp_path)
