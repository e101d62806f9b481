"""The block formats of GGUF files, by GGUF's names of their types."""

from __future__ import annotations

from specexec_kernels.formats import ggml_32, ggml_iq, ggml_k
from specexec_kernels.formats.ggml import GgmlFormat

GGUF_FORMATS: dict[str, GgmlFormat] = {
    each.name: each
    for each in (
        ggml_32.Q4_0(), ggml_32.Q4_1(), ggml_32.Q5_0(), ggml_32.Q5_1(), ggml_32.Q8_0(),
        ggml_32.IQ4_NL(), ggml_32.MXFP4(), ggml_k.Q2_K(), ggml_k.Q3_K(), ggml_k.Q4_K(),
        ggml_k.Q5_K(), ggml_k.Q6_K(), ggml_k.IQ4_XS(), ggml_iq.IQ1_S(), ggml_iq.IQ1_M(),
        ggml_iq.IQ2_XXS(), ggml_iq.IQ2_XS(), ggml_iq.IQ2_S(), ggml_iq.IQ3_XXS(), ggml_iq.IQ3_S(),
    )
}  # fmt: skip
