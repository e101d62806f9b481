"""The input of a trained head, which drafts from a target's hidden rows.

offload/mtp.py, eagle.py, assistant.py and block_heads.py say what such heads are. Their embeddings
give way to a HeadEmbedding, which joins a hidden row to each token by one of the parts here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specexec_cli.models.pass_context import CHUNK_ROWS
from specexec_cli.offload.checkpoint import INPUT, Checkpoint
from specexec_cli.planning.built_sizes import text_decoder


class HeadInput(nn.Module):
    """Joins hidden rows to the embeddings of tokens.

    Args:
        width: numbers in a hidden row that is joined to a token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def of_target(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The target's rows, (rows, width), as they are joined to tokens, (rows, hidden)."""
        return rows

    def joined(self, embedded: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """(1, rows, hidden) of each as the layer's input, (1, rows, its width) float32."""
        raise NotImplementedError

    def to_go_on(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows that the head made, as they are joined to the next tokens."""
        return rows


class Joint(HeadInput):
    """The input of an MTP layer: linear([norm(embedding), norm(hidden row)]).

    Args:
        norm: the model's last norm: both norms here are of its kind, with weights of their own.
        hidden: numbers in a row.
    """

    def __init__(self, norm: nn.Module, hidden: int) -> None:
        super().__init__(hidden)
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, device="meta")

    def joined(self, embedded: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Two (1, rows, hidden) as one (1, rows, hidden), float32; the linear reads `dtype`."""
        both = torch.cat((self.enorm(embedded), self.hnorm(rows.float())), dim=-1)
        made: Tensor = self.eh_proj(both.to(dtype))
        return made.float()


class Fusion(HeadInput):
    """The input of an EAGLE-3 head: [embedding, hidden row], with several of the target's as one.

    Args:
        width: numbers in all rows that the target keeps for a token.
        hidden: numbers in a row of the head.
        bias: whether the linear has one.
    """

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__(hidden)
        self.fc = nn.Linear(width, hidden, bias=bias, device="meta")

    def of_target(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """See HeadInput."""
        fused: Tensor = self.fc(rows.to(dtype))
        return fused.to(dtype)

    def joined(self, embedded: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Two (1, rows, hidden) side by side, (1, rows, 2 * hidden) float32."""
        return torch.cat((embedded, rows.float()), dim=-1)


class ContextRows(Fusion):
    """The input of a head that drafts blocks: [embedding, row], of which one alone is not zero.

    A committed token has a row, norm(linear(the target's rows)), a row of a block its embedding.

    Args:
        norm: the model's last norm: the one here is of its kind, with weights of its own.
        width, hidden, bias: as for Fusion.
    """

    def __init__(self, norm: nn.Module, width: int, hidden: int, bias: bool) -> None:
        super().__init__(width, hidden, bias)
        self.hidden_norm = copy.deepcopy(norm)

    def of_target(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """See HeadInput."""
        normed: Tensor = self.hidden_norm(super().of_target(rows, dtype).float())
        return normed.to(dtype)


class Projection(HeadInput):
    """The input of an assistant, linear([embedding, hidden row]), and a linear back to such rows.

    Args:
        width: numbers in a row of the target.
        hidden: numbers in a row of the assistant.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width)
        self.pre_projection = nn.Linear(2 * width, hidden, bias=False, device="meta")
        self.post_projection = nn.Linear(hidden, width, bias=False, device="meta")

    def joined(self, embedded: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Two (1, rows, width) as one (1, rows, hidden), float32; the linear reads `dtype`."""
        both = torch.cat((embedded, rows.float()), dim=-1)
        made: Tensor = self.pre_projection(both.to(dtype))
        return made.float()

    def to_go_on(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """(..., hidden) -> (..., width)."""
        made: Tensor = self.post_projection(rows.to(dtype))
        return made.to(dtype)


class EagleLayer(nn.Module):
    """A decoder layer that attends over an embedding and a hidden row, and goes on from the latter.

    Source: EAGLE-3, arXiv:2503.01840; where the residual begins, in front of the norm
    of the hidden row or behind it, published heads say as `norm_before_residual`.

    Args:
        layer: transformers' own layer of a Llama.
        hidden: numbers in a row.
        norm_first: whether the residual is the row behind its norm.
    """

    def __init__(self, layer: nn.Module, hidden: int, norm_first: bool) -> None:
        super().__init__()
        self.self_attn: Any = layer.self_attn
        self.mlp: Any = layer.mlp
        self.input_layernorm: Any = layer.input_layernorm
        self.post_attention_layernorm: Any = layer.post_attention_layernorm
        self.hidden_norm: Any = copy.deepcopy(self.input_layernorm)
        self._norm_first = norm_first
        for name in ("q_proj", "k_proj", "v_proj"):
            old: Any = getattr(self.self_attn, name)
            bias = old.bias is not None
            wide = nn.Linear(2 * hidden, old.out_features, bias=bias, device="meta")
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """(1, rows, 2 * hidden) -> (1, rows, hidden)."""
        embedded, rows = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(rows)
        residual = normed if self._norm_first else rows
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        attended, _ = self.self_attn(hidden_states=both, **kwargs)
        residual = residual + attended
        made: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return made


class BlockLayer(nn.Module):
    """A decoder layer that runs blocks, beside rows of committed tokens that it attends to alone.

    Source: DFlash, arXiv:2602.06036: keys and values of committed tokens are made of the same rows
    in every layer.

    Args:
        layer: transformers' own layer of a Qwen3.
        last: whether what it makes goes to the head.
    """

    def __init__(self, layer: nn.Module, last: bool) -> None:
        super().__init__()
        self.self_attn: Any = layer.self_attn
        self.mlp: Any = layer.mlp
        self.input_layernorm: Any = layer.input_layernorm
        self.post_attention_layernorm: Any = layer.post_attention_layernorm
        self._last = last

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """(1, rows, 2 * hidden) -> (1, rows, 2 * hidden), or (1, rows, hidden) if it is the last.

        What is made of committed tokens' rows is not for use.
        """
        own, context = hidden_states.chunk(2, dim=-1)
        block = torch.nonzero(~context[0].any(-1)).squeeze(1)  # a row behind a norm is not zero
        normed = self.input_layernorm(own[:, block])
        read = context.to(normed.dtype, copy=True)
        read[:, block] = normed
        attended, _ = self.self_attn(hidden_states=read, **kwargs)
        residual = own[:, block] + attended[:, block]
        made = own.clone()
        made[:, block] = residual + self.mlp(self.post_attention_layernorm(residual))
        return made if self._last else torch.cat((made, context), dim=-1)


def make_head(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Makes a model of few layers that has no weights yet a trained head.

    Args:
        checkpoint: the head's.
    """
    decoder, hidden = text_decoder(model), int(model.config.get_text_config().hidden_size)
    assert checkpoint.head is not None, "it is of a trained head"
    if checkpoint.head.keys:
        width = checkpoint[f"model.{INPUT}.post_projection.weight"].shape[0]
        decoder.add_module(INPUT, Projection(width, hidden))
        for layer in decoder.layers:  # type: ignore[union-attr]
            _attend_to_others(layer.self_attn)
        model.set_input_embeddings(nn.Identity())
        return
    if any(f"{INPUT}.eh_proj." in name for name in checkpoint):
        decoder.add_module(INPUT, Joint(decoder.norm, hidden))  # type: ignore[arg-type]
        return
    fc = checkpoint[f"model.{INPUT}.fc.weight"]
    bias = f"model.{INPUT}.fc.bias" in checkpoint
    layers: Any = decoder.layers
    if checkpoint.head.block is not None:
        norm: Any = decoder.norm
        decoder.add_module(INPUT, ContextRows(norm, fc.shape[-1], hidden, bias))
        for index, layer in enumerate(layers):
            layers[index] = BlockLayer(layer, index == len(layers) - 1)
    else:
        decoder.add_module(INPUT, Fusion(fc.shape[-1], hidden, bias))
        norm_first = bool(checkpoint.config["norm_before_residual"])
        layers[0] = EagleLayer(layers[0], hidden, norm_first)
    if "model.embed_tokens.weight" not in checkpoint:
        model.set_input_embeddings(nn.Identity())
    own = checkpoint.get("lm_head.weight")
    model.set_output_embeddings(
        nn.Identity() if own is None else nn.Linear(hidden, own.shape[0], bias=False, device="meta")
    )


def _attend_to_others(attention: Any) -> None:
    """Has a Gemma 4's attention read keys and values that the pass is given.

    transformers' config can say so of the last layers, but of not all of them.
    """
    attention.is_kv_shared_layer = True
    for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
        if hasattr(attention, name):
            delattr(attention, name)


class HeadEmbedding(nn.Module):
    """Takes the place of a head's embeddings: looks tokens up, and joins hidden rows to them.

    Args:
        table: the embeddings, the target's or the head's own.
        joint: joins the two.
        dtype: to compute in.
    Attributes:
        hidden_rows: (rows, hidden) of the next pass, one for each token.
    """

    def __init__(self, table: nn.Module, joint: HeadInput, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.joint, self.dtype = table, joint, dtype
        self.hidden_rows: Tensor | None = None

    @property
    def width(self) -> int:
        """Numbers in a hidden row that is joined to a token."""
        return self.joint.width

    @property
    def weight(self) -> Tensor:
        """The table, for modelling code that reads attributes of the weight."""
        return self.table.weight  # type: ignore[return-value]

    @property
    def host_ids(self) -> Tensor | None:
        """See MixedEmbedding."""
        return self.table.host_ids  # type: ignore[return-value]

    @host_ids.setter
    def host_ids(self, ids: Tensor) -> None:
        self.table.host_ids = ids

    def of_target(self, rows: Tensor) -> Tensor:
        """Rows that the target keeps, (rows, width), as this head reads them, (rows, hidden)."""
        return self.joint.of_target(rows, self.dtype)

    def to_go_on(self, rows: Tensor) -> Tensor:
        """Rows that this head made, (1, rows, its width), as it reads them, (1, rows, hidden)."""
        return self.joint.to_go_on(rows, self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """(1, rows) int64 -> (1, rows, width of the layer's input) float32."""
        assert self.hidden_rows is not None, "a pass has a hidden row for each token"
        embedded, rows = self.table(ids), self.hidden_rows[None]
        # a prompt's rows come all at once, and each takes several of its size until it is joined
        return torch.cat([
            self.joint.joined(*parts, self.dtype)
            for parts in zip(
                torch.split(embedded, CHUNK_ROWS, 1), torch.split(rows, CHUNK_ROWS, 1), strict=True
            )
        ], dim=1)  # fmt: skip
