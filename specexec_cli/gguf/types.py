"""The types of GGUF tensors: how many weights a block of each has, in how many bytes.

Source: `enum ggml_type` in ggml.h and the block structures in ggml-common.h of ggml-org/llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type of tensor; a plain type has blocks of one weight."""

    name: str
    block_weights: int
    block_bytes: int
    stored_as: str | None = None  # safetensors' name of the same dtype; None: packed blocks

    def bytes_of(self, weights: int) -> int:
        """Bytes of `weights` weights, which must fill whole blocks."""
        return weights // self.block_weights * self.block_bytes


# number in a file's header -> type
GGML_TYPES = {
    0: GgmlType("F32", 1, 4, "F32"),
    1: GgmlType("F16", 1, 2, "F16"),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, "BF16"),
    39: GgmlType("MXFP4", 32, 17),
}
# Types of integers that are multiplied by a scale of their block, to which some add an offset.
INTEGER_TYPES = frozenset(kind.name for kind in GGML_TYPES.values() if kind.name.startswith("Q"))
# number -> name of types that are not read, for the error message
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4",
}  # fmt: skip
