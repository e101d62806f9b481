"""Small models with a layer that predicts further tokens (MTP), stored as their makers store it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import edit_json
from gguf_toys import TOYS, Toy, fill_by_names, toy_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer

# by how such layers are stored: the type, and what makes it small
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
BEHIND = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
# those with three layers that read rows in front of the last norm, the second with heads of its own
BEFORE_NORM = ("mimo_v2_flash", "step3p7")
# those of which the goldens have what llama.cpp's converter makes
CONVERTED = {
    "qwen3_5_text": "qwen3_5-mtp", "qwen3_5_moe_text": "qwen3_5_moe-mtp",
    "qwen3_next": "qwen3_next-mtp", "glm4_moe": "glm4_moe-mtp",
    "mimo_v2_flash": "mimo_v2_flash-mtp", "step3p7": "step3p7-mtp",
}  # fmt: skip
_OPTIONS = {toy.model_type: toy.options for toy in TOYS.values() if toy.model_type in QWEN}
_JOINT = {
    "enorm.weight": "pre_fc_norm_embedding.weight", "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight", "post_norm.weight": "norm.weight",
}  # fmt: skip


def save_mtp_toy(
    model_type: str, folder: Path, std: float | None = 0.12, **settings: Any
) -> tuple[PreTrainedModel, MtpLayer]:
    """Writes a target with an MTP layer; returns transformers' own of both.

    Args:
        std: of random weights; None takes them from their names, as save_toy does.
    """
    torch.manual_seed(1)
    config = toy_config(Toy(model_type, {**_OPTIONS.get(model_type, {}), **settings}))
    target = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = MtpLayer(
        _of_one_layer(config), type(target.model.layers[-1]), type(target.model.norm), 0
    )
    for module in (target, layer):
        _fill(module.state_dict(), type(module).__name__, std)
    target.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    if model_type in QWEN:
        apart = model_type == "qwen3_next"
        stored |= {f"mtp.{name}": tensor for name, tensor in _below_mtp(layer, apart)}
        edit_json(folder / "config.json", mtp_num_hidden_layers=1)
    else:
        prefix = f"model.layers.{config.num_hidden_layers}."
        stored |= {prefix + name: tensor for name, tensor in _behind_last(layer)}
        edit_json(folder / "config.json", num_nextn_predict_layers=1)
    save_file(stored, path, metadata={"format": "pt"})
    return target.eval(), layer.eval()


def save_converted(model_type: str, folder: Path) -> Toy:
    """Writes one of CONVERTED; returns it, with what the converter is told."""
    if model_type not in BEFORE_NORM:
        save_mtp_toy(model_type, folder, std=None)
        return Toy(model_type)
    toy = TOYS[model_type]
    save_three_layers(model_type, folder, std=None, **toy.options)
    if model_type != "step3p7":
        return toy
    # as in the published config, of which transformers' class takes the last entries away
    said = {
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "partial_rotary_factors": [*toy.said["partial_rotary_factors"], *[1.0] * 3],
        "layer_types": [*toy.options["text_config"]["layer_types"], *["sliding_attention"] * 3],
        "num_nextn_predict_layers": 3,
    }
    return replace(toy, said={**toy.said, **said})


@torch.no_grad()
def _fill(tensors: Mapping[str, Tensor], named: str, std: float | None) -> None:
    """Gives tensors random weights, or by their names; see save_mtp_toy."""
    if std is None:
        fill_by_names(tensors, f"{named} ")
        return
    for weights in tensors.values():
        weights.normal_(std=std)


def save_three_layers(
    model_type: str, folder: Path, std: float | None = 0.3, **settings: Any
) -> tuple[PreTrainedModel, list[tuple[MtpLayer, Tensor]]]:
    """Writes a target with three MTP layers as MiMo-V2 and Step 3.7 are published.

    Args:
        std: see save_mtp_toy.
    Returns:
        transformers' own target, and its own of each layer with that layer's output head.
    """
    torch.manual_seed(1)
    config, step = toy_config(Toy(model_type, settings)), model_type == "step3p7"
    if step:  # layers with a window have twice as many heads
        config.text_config = _like(config.text_config, num_sliding_attention_heads=8)
    by = transformers.AutoModelForImageTextToText if step else transformers.AutoModelForCausalLM
    target, text = by.from_config(config, dtype=torch.float32), config.get_text_config()
    decoder = _decoder(target)
    own = _like(
        text, num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["dense"]
    )
    own._attn_implementation = "eager"
    layers = [
        MtpLayer(own, type(decoder.layers[-1]), type(decoder.norm), 0).eval() for _ in range(3)
    ]
    heads = [
        torch.nn.Parameter(torch.empty(text.vocab_size, text.hidden_size)) if step
        else target.lm_head.weight for _ in layers
    ]  # fmt: skip
    for number, module in enumerate((target, *layers)):
        _fill(module.state_dict(), f"{model_type} {number}", std)
    for number, head in enumerate(heads):
        _fill({"head": head}, f"{model_type} {number}", std)
    target.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    for number, (layer, head) in enumerate(zip(layers, heads, strict=True)):
        prefix = f"model.layers.{text.num_hidden_layers + number}." if step else ""
        prefix = prefix or f"model.mtp.layers.{number}."
        for name, tensor in _as_published(layer, head if step else None):
            stored[prefix + name] = tensor
    save_file(stored, path, metadata={"format": "pt"})
    if step:
        _say_as_step(folder / "config.json")
    return target.eval(), list(zip(layers, heads, strict=True))


def _like(config: PretrainedConfig, **settings: Any) -> PretrainedConfig:
    """A config with other settings, of which what it says of single layers is made anew."""
    said = {key: each for key, each in config.to_dict().items() if key != "per_layer_config"}
    return type(config)(**{**said, **settings})


def _decoder(target: PreTrainedModel) -> Any:
    """The part of a model that reads text."""
    return getattr(target.model, "language_model", target.model)


def _as_published(layer: MtpLayer, head: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    norm = "final_layernorm" if head is None else "transformer.shared_head.norm"
    names = {"post_norm": norm, "self_attn.sinks": "self_attn.attention_sink_bias"}
    if head is None:
        names["post_attention_layernorm"] = "pre_mlp_layernorm"
    else:
        yield "transformer.shared_head.output.weight", head.detach().clone()
    for name, tensor in _tensors(layer, True):
        part, _, leaf = name.rpartition(".")
        yield names.get(name) or f"{names.get(part, part)}.{leaf}", tensor


def _say_as_step(path: Path) -> None:
    """Says in a config.json of layers what the hub's does: in lists of all, those behind too."""
    text = json.loads(path.read_text())["text_config"]
    sparse = [n for n, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    text["layer_types"] += ["sliding_attention"] * 3
    text |= {
        "num_nextn_predict_layers": 3, "moe_layers_enum": ",".join(map(str, sparse)),
        "attention_other_setting": {"num_attention_heads": 8}, "rope_theta": 10000.0,
        "swiglu_limits": [None] * 7,
    }  # fmt: skip
    for key in (
        "mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types", "per_layer_config",
        "num_sliding_attention_heads",
    ):  # fmt: skip
        text.pop(key, None)
    edit_json(path, text_config=text)


def _of_one_layer(config: PretrainedConfig) -> PretrainedConfig:
    own = type(config).from_dict(config.to_dict())
    own.num_hidden_layers, own.layer_types = 1, ["full_attention"]
    own._attn_implementation = "sdpa"
    own._experts_implementation = "eager"
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    if hasattr(own, "mlp_layer_types"):
        own.mlp_layer_types = ["sparse"]
    return own


def _below_mtp(layer: MtpLayer, apart: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _tensors(layer, apart):
        yield _JOINT.get(name) or f"layers.0.{name}", tensor


def _behind_last(layer: MtpLayer) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _tensors(layer, True):
        yield "shared_head.norm.weight" if name == "post_norm.weight" else name, tensor


def _tensors(layer: MtpLayer, apart: bool) -> Iterator[tuple[str, Tensor]]:
    """The layer's tensors, the block's by their names in it; each expert's alone if `apart`."""
    for whole, tensor in layer.state_dict().items():
        name = whole.removeprefix("mtp_block.")
        block, _, leaf = name.rpartition(".")
        if not apart or leaf not in ("gate_up_proj", "down_proj"):
            yield name, tensor.clone()
            continue
        for index, each in enumerate(tensor):
            parts = {"down_proj": each}
            if leaf == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), each.chunk(2), strict=True))
            for part, weight in parts.items():
                yield f"{block}.{index}.{part}.weight", weight.clone()


@torch.no_grad()
def reference(
    target: PreTrainedModel, layer: MtpLayer, tokens: list[int], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """What transformers' own layer makes of a text and the hidden rows before its tokens.

    Args:
        tokens: (rows,) the text without its first token.
        hidden: (rows, hidden).
    Returns:
        (rows, vocab) logits and (rows, hidden) rows to go on from.
    """
    positions = torch.arange(1, len(tokens) + 1)[None]
    embeddings = target.get_input_embeddings()(torch.tensor([tokens]))
    rotary = target.model.rotary_emb(embeddings, positions)
    seen = torch.ones(len(tokens), len(tokens)).tril().bool()
    attend = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    found = layer(embeddings, hidden[None], rotary, attend, positions, None)
    return target.lm_head(found)[0], found[0]


@torch.no_grad()
def reference_before_norm(
    target: PreTrainedModel, layer: MtpLayer, head: Tensor, tokens: list[int], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference`, for a layer that attends in a window and whose rows are not normed to go on.

    Args:
        head: (vocab, hidden) the layer's output head.
    """
    decoder = _decoder(target)
    positions = torch.arange(1, len(tokens) + 1)[None]
    embeddings = target.get_input_embeddings()(torch.tensor([tokens]))
    rotary = decoder.rotary_emb(embeddings, positions, layer_type="sliding_attention")
    ones = torch.ones(len(tokens), len(tokens)).bool()
    seen = ones.tril() & ~ones.tril(-layer.config.sliding_window)
    attend = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    joined = torch.cat([layer.enorm(embeddings), layer.hnorm(hidden[None])], dim=-1)
    made = layer.mtp_block(
        layer.eh_proj(joined), position_embeddings=rotary, attention_mask=attend,
        position_ids=positions,
    )  # fmt: skip
    return (layer.post_norm(made) @ head.T)[0], made[0]


def reference_of_several(
    target: PreTrainedModel,
    layers: list[tuple[MtpLayer, Tensor]],
    text: list[int],
    path: list[int],
    *,
    chained: bool,
) -> Tensor:
    """(vocab,) the logits behind a path of drafts.

    As SGLang's `multi_layer_eagle_worker_v2.py` has it: every layer runs over as many rows, the
    tokens move on by one from layer to layer, and the hidden rows of chained layers become those
    that the layer made. Behind the last layer a row more of it is run for each token.
    """
    tokens, hidden, made = text[1:], rows_before_norm(target, text[:-1]), list[Tensor]()
    for depth in range(len(path) + 1):
        layer, head = layers[min(depth, len(layers) - 1)]
        logits, out = reference_before_norm(target, layer, head, tokens, hidden)
        made.append(out[-1:])
        if depth == len(path):
            break
        behind = depth + 1 - len(layers)  # below 0 there is a layer for the next token
        tokens = [*tokens, path[depth]]
        if behind < 0:
            tokens, hidden = tokens[1:], out if chained else hidden
        else:
            hidden = torch.cat([hidden, made[-1] if chained else made[behind]])
    return logits[-1]


@torch.no_grad()
def rows_before_norm(target: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(tokens, hidden): what the target's last norm reads."""
    found: list[Tensor] = []
    hook = _decoder(target).norm.register_forward_pre_hook(
        lambda norm, given: found.append(given[0][0])
    )
    target(input_ids=torch.tensor([tokens]))
    hook.remove()
    return found[0]


@torch.no_grad()
def hidden_rows(target: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(tokens, hidden): what the target's head reads."""
    found: Tensor = target.model(torch.tensor([tokens])).last_hidden_state[0]
    return found


def recite(folder: Path, by: str) -> list[int]:
    """Changes a toy's weights so that each token is followed by one certain other.

    Layers add nothing to a row. A token's embedding is one number, and the head leads from it to
    the token that follows.

    Args:
        by: what the MTP layer goes by: "tokens", "hidden rows" alone, or "nothing".
    Returns:
        for each token the one that follows it.
    """
    path = folder / "model.safetensors"
    stored = load_file(path)
    vocab, hidden = stored["lm_head.weight"].shape
    assert vocab <= hidden
    follows = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))
    one = torch.eye(vocab, hidden)
    step = torch.zeros(hidden, hidden)
    step[follows, torch.arange(vocab)] = 1.0
    joint = {
        "tokens": (torch.eye(hidden), 0 * step), "hidden rows": (0 * step, step),
        "nothing": (0 * step, 0 * step),
    }[by]  # fmt: skip
    for name, tensor in stored.items():
        if name.endswith(("fc.weight", "eh_proj.weight")):
            tensor.copy_(torch.cat(joint, dim=1))
            if name.startswith("model.mtp.layers."):  # as far as MiMo-V2's are behind their rows
                times = 1 + int(name.split(".")[3])
                far = torch.linalg.matrix_power(joint[1], times)
                tensor.copy_(torch.cat((joint[0], far), dim=1))
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor.zero_()
        elif name.endswith("norm.weight") or ".pre_fc_norm_" in name:
            tensor.fill_(0.0 if "mtp.fc.weight" in stored else 1.0)
    stored["model.embed_tokens.weight"].copy_(one)
    stored["lm_head.weight"].zero_()
    stored["lm_head.weight"][follows] = 10.0 * one
    save_file(stored, path, metadata={"format": "pt"})
    found: list[int] = follows.tolist()
    return found
