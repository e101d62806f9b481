"""The weights that models.toml has counted are those of the models, and a plan uses them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specexec_cli.catalog.models_file import ModelEntry, read_models_file
from specexec_cli.catalog.registry import load_registry
from specexec_cli.catalog.weight_counts import WeightCounts, counts_of, table_of
from specexec_cli.errors import ConfigError
from specexec_cli.planning import built_sizes, kept_counts
from specexec_cli.planning.built_sizes import count_weights

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import count_sizes

SMALL = """# a comment stays
[models.one]
repo = "org/one"
model_type = "deepseek_v3"
shape = { hidden_size = 64, num_hidden_layers = 4, vocab_size = 100, moe_intermediate_size = 32, \
n_routed_experts = 8, num_experts_per_tok = 2, first_k_dense_replace = 1 }
note = "behind it"

[models.bare]
repo = "org/bare"

[pairs.couple]
target = "one"
draft = "one"
"""


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> None:
    monkeypatch.setattr(count_sizes, "PATH", path)
    monkeypatch.setattr(sys, "argv", ["count_sizes.py", *options])
    count_sizes.main()


def test_every_stored_count_is_that_of_the_built_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, count_sizes.PATH, "--check")


def test_a_count_that_is_missing_or_wrong_is_found_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "models.toml"
    path.write_text(SMALL)
    with pytest.raises(SystemExit, match=r"counts differ of one: run scripts/count_sizes\.py"):
        run(monkeypatch, path, "--check")
    run(monkeypatch, path)
    written = path.read_text()
    run(monkeypatch, path)
    assert path.read_text() == written
    lines = [line for line in written.splitlines() if not line.startswith("counted")]
    assert lines == SMALL.splitlines()
    run(monkeypatch, path, "--check")
    path.write_text(written.replace("vocab = 100", "vocab = 101"))
    with pytest.raises(SystemExit, match="counts differ of one"):
        run(monkeypatch, path, "--check")


@pytest.mark.parametrize("name", ["gemma4-26b-a4b-it", "deepseek-v3.1", "demo-target"])
def test_a_table_has_all_of_the_counts(name: str) -> None:
    model = load_registry().resolve(name)
    counts = model.counts()
    assert counts is not None
    assert table_of(counts) == model.counted
    assert counts_of(table_of(counts)) == counts


def test_counts_are_used_unless_the_checkpoint_contradicts_them() -> None:
    entry = load_registry().resolve("demo-target")
    config = entry.config_json()
    assert entry.counts(config) == entry.counts()
    assert entry.counts({**config, "use_cache": True}) == entry.counts()
    assert entry.counts({"model_type": "seen", "text_config": config}) == entry.counts()
    assert entry.counts({**config, "num_hidden_layers": 7}) is None
    assert entry.counts({**config, "model_type": "qwen3"}) is None
    assert ModelEntry(name="bare", repo="org/bare").counts() is None


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []}, {"layers": [{"at": "0-99999999"}]}, {"layers": [{"at": "1-2"}]},
        {"layers": [{"at": "0", "dense": [[1, 2]]}]}, {"layers": [{"at": "0", "kv": -1}]},
        {"layers": [{"at": "0", "experts": [[8, 64, 32]]}]}, {"head": "many"}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_count_is_refused_in_a_line(change: dict[str, Any]) -> None:
    counted = {**load_registry().resolve("demo-target").counted, **change}
    entry = ModelEntry(name="own", repo="org/own", counted=counted)
    with pytest.raises(ConfigError, match=r"\[models.own\] counted is not as .* leave it out"):
        entry.counts()


def test_experts_larger_than_memory_are_counted() -> None:
    """Llama 4 makes its experts by torch.zeros(), which must not write a terabyte."""
    counts = count_weights(
        {"model_type": "llama4_text", "hidden_size": 1 << 16, "intermediate_size": 1 << 16,
         "num_local_experts": 64, "num_hidden_layers": 1, "interleave_moe_layer_step": 1,
         "vocab_size": 100}
    )  # fmt: skip
    assert max(counts.layers[0].routed) == (64, 1 << 16, 1 << 17)


def test_recurrent_layers_have_states_in_place_of_keys() -> None:
    counts = count_weights(
        {"model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "linear_conv_kernel_dim": 4, "num_experts": 4, "moe_intermediate_size": 32,
         "vocab_size": 100}
    )  # fmt: skip
    recurrent, attending = counts.layers[0], counts.layers[3]
    channels = 2 * (2 * 8) + 4 * 8  # queries, keys and values
    assert (recurrent.kv, recurrent.node) == (0, 2 * channels)
    assert recurrent.state == 2 * (channels * 3 + 4 * 8 * 8)
    assert (attending.kv, attending.state, attending.node) == (2 * 2 * 16, 0, 0)
    assert all(count != channels for count, *_ in recurrent.matrices())  # nobody packs convolutions
    assert counts_of(table_of(counts)) == counts


def test_channels_of_mamba_keep_states_and_their_rates() -> None:
    counts = count_weights(
        {"model_type": "mamba", "hidden_size": 16, "intermediate_size": 32, "state_size": 4,
         "num_hidden_layers": 2, "conv_kernel": 4, "time_step_rank": 2, "vocab_size": 100}
    )  # fmt: skip
    assert counts.layers[0].state == 2 * 32 * 3 + (2 + 1) * 32 * 4
    assert counts.layers[0].node == 2 * 32 + 32 + 2 * 4
    assert counts.layers[0].kv == 0


def test_weights_that_layers_share_are_stored_once() -> None:
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    counts = count_weights(
        {"model_type": "zamba2", "hidden_size": 16, "num_hidden_layers": 4, "mamba_d_state": 8,
         "layers_block_type": kinds, "mamba_headdim": 8, "n_mamba_heads": 4, "mamba_ngroups": 1,
         "num_attention_heads": 4, "intermediate_size": 32, "num_mem_blocks": 1,
         "adapter_rank": 2, "use_shared_attention_adapter": False, "vocab_size": 100}
    )  # fmt: skip
    first, second = counts.layers[1], counts.layers[3]
    assert (first.shared, first.params) == (0, second.params)
    assert 0 < second.shared < second.params
    whole = sum(layer.params for layer in counts.layers) + counts.outside
    assert counts.total_bytes(2, None) == 2 * (whole - second.shared)
    assert counts_of(table_of(counts)) == counts


def test_known_models_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: object) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr(built_sizes, "empty_model", refused)
    for model in read_models_file(count_sizes.PATH).models.values():
        assert model.counts() is not None
        assert model.size_bytes


def test_counts_of_other_models_are_kept_for_later_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not believed where they are damaged, or of another version of transformers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 3, "vocab_size": 9,
              "num_attention_heads": 2, "intermediate_size": 8}  # fmt: skip
    built: list[object] = []
    build = built_sizes.empty_model
    monkeypatch.setattr(built_sizes, "empty_model", lambda c: built.append(c) or build(c))

    def later() -> WeightCounts:
        built_sizes._known.cache_clear()
        return count_weights(config)

    first = later()
    assert later() == first
    assert len(built) == 1
    (kept,) = (tmp_path / "specexec" / "counts").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(content.replace(b'"hidden": 8', b'"hidden": 9'))
    assert later() == first
    assert len(built) == 2
    assert kept.read_bytes() == content
    kept_counts._counted_by.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(kept_counts, "installed_version", lambda package: "another")
        assert later() == first
    kept_counts._counted_by.cache_clear()
    assert len(built) == 3


def test_a_config_without_layers_describes_no_model() -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 2, "vocab_size": 9}
    with pytest.raises(ConfigError, match=r"config\.json describes no model: it has no layers"):
        count_weights({"model_type": "llama", "intermediate_size": 8, **shape})
