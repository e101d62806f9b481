"""Counts the layers and experts in the tensors of a GGUF file, whatever its metadata says.

transformers builds as many as a config names before anyone notices that their weights are missing,
so a damaged count has to be checked against the tensors first.
"""

from __future__ import annotations

import re

from specexec_cli.gguf.container import GgufFile

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)", re.ASCII)
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.weight", re.ASCII)
_OLD_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)\.(\d{1,9})\.weight", re.ASCII)


def layer_count(file: GgufFile) -> int | None:
    """The number of layers; None if a layer between others has no tensors."""
    found = (_LAYER.fullmatch(name) for name in file.tensors)
    return _count({int(each[1]) for each in found if each})


def expert_count(file: GgufFile) -> int | None:
    """The number of experts of a layer; None if layers differ, or an expert has no tensors."""
    stacks = {
        tensor.shape[0] if len(tensor.shape) == 3 and tensor.stop > tensor.start else 0
        for name, tensor in file.tensors.items()
        if _EXPERTS.fullmatch(name)
    }
    if stacks:
        return stacks.pop() if len(stacks) == 1 else None
    found = (_OLD_EXPERT.fullmatch(name) for name in file.tensors)
    return _count({int(each[1]) for each in found if each})


def layers_with(file: GgufFile, part: str) -> set[int]:
    """The numbers of the layers that have a part, such as `ffn_gate_exps`."""
    found = (_LAYER.fullmatch(name) for name in file.tensors)
    return {int(each[1]) for each in found if each and each[2].startswith(f"{part}.")}


def _count(numbers: set[int]) -> int | None:
    """How many numbers there are; None unless they run from 0 up without a gap."""
    return len(numbers) if len(numbers) == max(numbers, default=-1) + 1 else None
