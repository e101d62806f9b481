"""Converts a rig's 4-bit GPTQ weights to llama.cpp's Q4_0: the same numbers in another order.

With GPTQ zero points of 8, both formats mean scale * (code - 8), so nothing is rounded again. GPTQ
packs eight inputs of an output into a word. Q4_0 has a block for 32 inputs of an output: an fp16
scale, then 16 bytes with the first 16 codes in their low halves and the others in their high
halves. Knows no files.

Source: block_q4_0 in ggml/src/ggml-common.h of ggml-org/llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAVES = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}  # a linear's tensors, and dtypes
_BLOCK = 32  # inputs of a Q4_0 block
_ZEROS_OF_8 = 0x77777777  # a word of eight zero points of 8, stored minus one


@dataclass(frozen=True, slots=True)
class GptqLinear:
    """The tensors of a linear in a GPTQ checkpoint, as they are stored."""

    qweight: NDArray[np.uint32]  # (inputs / 8, outputs)
    qzeros: NDArray[np.uint32]  # (groups, outputs / 8)
    scales: NDArray[np.float16]  # (groups, outputs)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return self.qweight.shape[1], 8 * self.qweight.shape[0]

    def q4_0(self) -> NDArray[np.uint8]:
        """The weight in Q4_0, (outputs, inputs / 32 * 18) bytes.

        Raises:
            ValueError: the weight has no exact form in Q4_0.
        """
        outputs, inputs = self.shape
        group = inputs // len(self.scales)
        if group % _BLOCK or group * len(self.scales) != inputs:
            raise ValueError(f"groups of {group} inputs are no multiple of Q4_0's {_BLOCK}")
        if (self.qzeros != _ZEROS_OF_8).any():
            raise ValueError("zero points differ from 8, which Q4_0 always has")
        blocks = inputs // _BLOCK
        packed = np.ascontiguousarray(self.qweight.T).view(np.uint8).reshape(outputs, blocks, 16)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(outputs, blocks, _BLOCK)
        made = np.empty((outputs, blocks, 18), dtype=np.uint8)
        scales = np.repeat(self.scales.T, group // _BLOCK, axis=1)
        made[..., :2] = np.ascontiguousarray(scales).view(np.uint8).reshape(outputs, blocks, 2)
        made[..., 2:] = codes[..., :16] | codes[..., 16:] << 4
        return made.reshape(outputs, -1)
