"""Splits the MXFP4 tensors of gpt-oss checkpoints, which hold all experts of a layer, by expert.

`X.experts.gate_up_proj_blocks` (experts, outputs, groups, 16 bytes), its `_scales` (experts,
outputs, groups) and its `_bias` (experts, outputs) become `X.experts.N.gate_up.blocks` (outputs,
bytes), `.scales` and `.bias`; the tensors of `down_proj` are split in the same way. No byte moves:
an expert's share of each tensor lies in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import TensorRange

_FUSED = re.compile(
    r"(?P<stem>(?P<block>.+\.experts)\.(?P<linear>gate_up|down)_proj)_(?P<leaf>blocks|scales|bias)"
)
_GROUP_BYTES = 16  # of a group of 32 weights
_DIMENSIONS = {"blocks": 4, "scales": 3, "bias": 2}


def experts_apart(tensors: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
    """All tensors of a checkpoint, with MXFP4 experts split; unchanged if there are none.

    Raises:
        CheckpointError: blocks or scales are missing, or their shapes do not fit each other.
    """
    found: dict[str, TensorRange] = {}
    for name, tensor in tensors.items():
        fused = _FUSED.fullmatch(name)
        packed = f"{fused['stem']}_blocks" if fused else ""
        if fused is None or (packed not in tensors and fused["leaf"] != "scales"):
            found[name] = tensor
            continue
        _check(tensor, fused["leaf"], fused["stem"], tensors)
        prefix, suffix = f"{fused['block']}.", f".{fused['linear']}.{fused['leaf']}"
        for index, own in enumerate(_each(tensor)):
            apart = f"{prefix}{index}{suffix}"
            if apart in tensors:
                raise CheckpointError(
                    f"{tensor.path}: '{apart}' is stored beside '{tensor.name}', which has it too: "
                    "download the checkpoint again"
                )
            found[apart] = own
    return found


def _check(tensor: TensorRange, leaf: str, stem: str, tensors: Mapping[str, TensorRange]) -> None:
    """Checks the dtype and shape of one of an MXFP4 layer's tensors against those of its blocks."""
    for other in ("blocks", "scales"):
        if f"{stem}_{other}" not in tensors:
            raise CheckpointError(
                f"{tensor.path}: '{tensor.name}' is there, '{stem}_{other}' is missing: "
                "download the checkpoint again"
            )
    blocks = tensors[f"{stem}_blocks"]
    rank = _DIMENSIONS[leaf]
    fits = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP_BYTES
    if blocks.dtype != "U8" or not fits or not blocks.n_bytes:  # empty ones fit any count
        raise CheckpointError(
            f"{blocks.path}: tensor '{blocks.name}' is {blocks.dtype} of shape "
            f"{list(blocks.shape)}, expected U8 of [experts, outputs, groups, {_GROUP_BYTES}]"
        )
    if tensor.shape != blocks.shape[:rank] or (leaf == "scales" and tensor.dtype != "U8"):
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} of shape "
            f"{list(tensor.shape)}, '{blocks.name}' says {list(blocks.shape[:rank])}. "
            "Are all files of the same model?"
        )


def _each(tensor: TensorRange) -> Iterator[TensorRange]:
    """One tensor for each expert: a matrix with a row for each output, or a vector."""
    count, *rest = tensor.shape
    size = tensor.n_bytes // count if count else 0
    shape = (rest[0], rest[1] * rest[2]) if len(rest) == 3 else tuple(rest)
    for index in range(count):
        start = tensor.start + index * size
        yield TensorRange(
            f"{tensor.name}[{index}]", tensor.path, tensor.dtype, shape, start, start + size
        )
