"""A small Gemma 4 and its assistant as they are published, beside transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_toys import TOYS, fill_by_names, save_toy
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

CONVERTED = "gemma4_text-assistant"  # what llama.cpp's converter made of one, in the goldens
WINDOW = 8  # of the target's sliding layers
_SIZES = {
    "vocab_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16,
    "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "sliding_window": WINDOW,
    "use_double_wide_mlp": False, "enable_moe_block": False,
}  # fmt: skip
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def save_gemma(folder: Path, shared: int = 0, hidden: int = 32) -> PreTrainedModel:
    """Writes a Gemma 4 with random weights; returns transformers' own.

    Args:
        shared: of its six layers, how many at the end read the keys of those before; such a model
            has embeddings for each layer too, as E2B and E4B have.
    """
    torch.manual_seed(3)
    each_layer = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4}
    config = transformers.Gemma4TextConfig(
        **(_SIZES | (each_layer if shared else {})), hidden_size=hidden, num_hidden_layers=6,
        num_kv_shared_layers=shared, layer_types=2 * _KINDS, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    target = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(target)
    target.save_pretrained(folder)
    return target.eval()


def save_converted(folder: Path) -> None:
    """Writes the assistant of CONVERTED, and its target beside it."""
    target = save_toy(TOYS["gemma4_text"], folder.with_name("target"))
    save_assistant(folder, target, named=True)


def save_assistant(
    folder: Path,
    target: PreTrainedModel,
    absent: Sequence[str] = (),
    named: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Writes an assistant with random weights; returns transformers' own.

    Args:
        absent: tensors that are left out.
        named: whether weights follow from their names, as in save_toy.
        settings: of config.json, beside the usual ones.
    """
    torch.manual_seed(7)
    ordered = settings.pop("use_ordered_embeddings", False)
    window, whole = (
        target.config.per_layer_config[target.config.layer_types.index(kind)]
        for kind in ("sliding_attention", "full_attention")
    )
    sizes = _SIZES | {
        "head_dim": window.head_dim, "num_key_value_heads": window.num_key_value_heads,
        "global_head_dim": whole.head_dim, "num_global_key_value_heads": whole.num_key_value_heads,
    }  # fmt: skip
    text = transformers.Gemma4TextConfig(
        **sizes, hidden_size=16, num_hidden_layers=3, layer_types=_KINDS, num_kv_shared_layers=3
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=target.config.hidden_size,
        use_ordered_embeddings=ordered, num_centroids=8, centroid_intermediate_top_k=2,
    )  # fmt: skip
    # What the class computes is transformers' own. The release that is tested with cannot make it:
    # its config refuses a model whose layers all read other keys, as this one's do.
    text_class: Any = transformers.Gemma4TextConfig
    before = text_class.kv_sharing_modes
    text_class.kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    try:
        assistant = Gemma4AssistantForCausalLM(config)
    finally:
        text_class.kv_sharing_modes = before
    _fill(assistant)
    if named:
        fill_by_names(assistant.state_dict())
    if ordered:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
        assistant.masked_embedding.token_ordering.copy_(order)
    assistant.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = {name: each for name, each in load_file(path).items() if name not in absent}
    save_file(stored, path, metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(said))
    return assistant.eval()


def _fill(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, weights in model.state_dict().items():
            if name.endswith("layer_scalar"):
                weights.fill_(0.7)
            elif weights.is_floating_point():
                weights.normal_(std=0.3)


class Read:
    """What a target makes of a text, for its assistant to read: (tokens, hidden) rows behind the
    last norm, and by the kind of a layer the keys and values of the last that has any."""

    @torch.no_grad()
    def __init__(self, target: PreTrainedModel, tokens: Sequence[int]) -> None:
        cache = DynamicCache(config=None)
        found = target.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        self.rows: Tensor = found.last_hidden_state[0]
        self.table = target.get_input_embeddings()
        kinds = target.config.layer_types
        kinds = kinds[: len(kinds) - target.config.num_kv_shared_layers]
        self.keys = {
            kind: (cache.layers[index].keys, cache.layers[index].values)
            for index, kind in enumerate(kinds)
        }


@torch.no_grad()
def reference(
    assistant: PreTrainedModel, read: Read, token: int, row: Tensor
) -> tuple[Tensor, Tensor]:
    """What transformers' own assistant makes of one token behind a text.

    Args:
        read: of the text in front of the last committed token.
        token: that one, or one that was drafted behind it.
        row: (hidden,) the target's row in front of it, or the assistant's own.
    Returns:
        (vocab,) logits and the (hidden,) row to go on from.
    """
    # In a window transformers' class sees two tokens more at its far end than the target does.
    assistant.config.get_text_config().sliding_window = WINDOW - 2
    both = torch.cat([read.table(torch.tensor([[token]])), row[None, None]], dim=-1)
    places = torch.tensor([[len(read.rows)]])
    found = assistant(inputs_embeds=both, position_ids=places, shared_kv_states=read.keys)
    return found.logits[0, -1], found.last_hidden_state[0, -1]
