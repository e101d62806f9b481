"""The input of a layer that predicts further tokens (MTP); offload/mtp.py says what that is."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specexec_cli.models.pass_context import CHUNK_ROWS
from specexec_cli.offload.mtp import PART
from specexec_cli.planning.built_sizes import text_decoder


class Joint(nn.Module):
    """Joins two rows into one: linear([norm(embedding), norm(hidden row)]).

    Args:
        norm: the model's last norm: both norms here are of its kind, with weights of their own.
        hidden: numbers in a row.
    """

    def __init__(self, norm: nn.Module, hidden: int) -> None:
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, device="meta")


def add_joint(model: PreTrainedModel, hidden: int) -> None:
    """Gives a model that has no weights yet the parameters of an MTP layer's input.

    Args:
        hidden: numbers in a row.
    """
    decoder = text_decoder(model)
    decoder.add_module(PART, Joint(decoder.norm, hidden))  # type: ignore[arg-type]


class MtpEmbedding(nn.Module):
    """Takes the place of the embeddings: looks tokens up, and joins hidden rows to them.

    Args:
        table: the target's embeddings.
        joint: the two norms and the linear, with weights.
        dtype: of the linear's input.
    Attributes:
        hidden_rows: (rows, hidden) of the next pass, one for each token.
    """

    def __init__(self, table: nn.Module, joint: Joint, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.joint, self.dtype = table, joint, dtype
        self.hidden_rows: Tensor | None = None

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

    def forward(self, ids: Tensor) -> Tensor:
        """(1, rows) int64 -> (1, rows, hidden) float32."""
        assert self.hidden_rows is not None, "a pass has a hidden row for each token"
        embedded, rows = self.table(ids), self.hidden_rows[None]
        # a prompt's rows come all at once, and each takes several of its size until it is joined
        return torch.cat([
            self._joined(*parts)
            for parts in zip(
                torch.split(embedded, CHUNK_ROWS, 1), torch.split(rows, CHUNK_ROWS, 1), strict=True
            )
        ], dim=1)  # fmt: skip

    def _joined(self, embedded: Tensor, rows: Tensor) -> Tensor:
        joint = self.joint
        both = torch.cat((joint.enorm(embedded), joint.hnorm(rows.float())), dim=-1)
        joined: Tensor = joint.eh_proj(both.to(self.dtype))
        return joined.float()
