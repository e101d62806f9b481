"""Write a Llama or Mixtral rig's weights as a GGUF for llama.cpp, tensor by tensor.

    python gguf_rig.py RIG OUT.gguf [BITS]               (needs the packages gguf and numpy)

BITS is 16 (bfloat16, the default), 8 (Q8_0) or 4 (Q4_0) and applies to the layers; embeddings and
head are bfloat16, as in rigs of packed weights. BITS may also be Q4_K_M, llama.cpp's mixture of
Q4_K and Q6_K, embeddings and head included, whose matrices its own code quantizes (needs the
package xllamacpp too). A rig of `make_rig.py --bits 4` becomes Q4_0 without rounding
(gguf_gptq.py), with the same weights; leave BITS out for that.

The vocabulary is the rig's own if it has a tokenizer.json of a byte-level BPE.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_gptq import LEAVES, GptqLinear

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


_DTYPES = {"BF16": np.uint16, "F32": np.float32}
_PACKED = {"I32": np.uint32, "F16": np.float16}


def _wide(words: np.ndarray) -> np.ndarray:
    """bfloat16 words as float32; float32 numbers as they are."""
    if words.dtype == np.float32:
        return words
    return (words.astype(np.uint32) << 16).view(np.float32)


Matrix = np.ndarray | GptqLinear  # bfloat16 words, float32, or packed weights
Matrices = list[Matrix]  # one matrix, or one for each expert


def _tensors(rig: Path) -> Iterator[tuple[str, tuple[int, ...], Matrices]]:
    """Yields (name in the GGUF, shape, matrices) of every tensor; experts are stacked."""
    stacks: dict[str, dict[int, tuple[tuple[int, ...], Matrix]]] = {}
    for name, shape, words in _linears(rig):
        place = re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(w\d)\.weight", name)
        if place is None:
            yield _renamed(name), shape, [words]
        else:
            layer, expert, leaf = place.groups()
            stack = stacks.setdefault(f"blk.{layer}.{_EXPERTS[leaf]}.weight", {})
            stack[int(expert)] = shape, words
    for name, stack in stacks.items():
        shape, _ = stack[0]
        yield name, (len(stack), *shape), [stack[expert][1] for expert in range(len(stack))]


def _linears(rig: Path) -> Iterator[tuple[str, tuple[int, ...], Matrix]]:
    """Yields (name, shape, matrix) of every weight; a packed weight's tensors are one matrix."""
    waiting: dict[str, dict[str, np.ndarray]] = {}
    for name, shape, words in _stored(rig):
        linear, _, leaf = name.rpartition(".")
        if leaf not in LEAVES:
            yield name, shape, words
            continue
        parts = waiting.setdefault(linear, {})
        parts[leaf] = words.reshape(shape)
        if len(parts) == len(LEAVES):
            packed = GptqLinear(**waiting.pop(linear))
            yield f"{linear}.weight", packed.shape, packed
    if waiting:
        raise SystemExit(f"{next(iter(waiting))} of {rig} lacks one of {', '.join(LEAVES)}")


def _stored(rig: Path) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Yields (name, shape, numbers as stored) of every tensor in the checkpoint's files."""
    for path in sorted(rig.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        words = np.memmap(path, np.uint8, "r", offset=8 + length)
        for name, entry in header.items():
            if name != "__metadata__":
                packed = LEAVES.get(name.rpartition(".")[2])
                known = _DTYPES if packed is None else {packed: _PACKED[packed]}
                if entry["dtype"] not in known:
                    raise SystemExit(f"{path}: {name} is {entry['dtype']}, expected "
                                     f"{' or '.join(known)}")  # fmt: skip
                start, stop = entry["data_offsets"]
                yield name, tuple(entry["shape"]), words[start:stop].view(known[entry["dtype"]])


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.weight"
    return f"{_NAMES[stem]}.weight"


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query and key rows in llama.cpp's order: rotary pairs beside each other."""
    pairs = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


_KINDS: dict[int | str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    8: (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    4: (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "Q4_K_M": (gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
}


def _header(writer: gguf.GGUFWriter, config: dict[str, Any], bits: int | str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(_KINDS[bits][1])


def _numbers(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Writes a vocabulary of which only the size matters: each token is spelled as its number."""
    writer.add_tokenizer_model("llama")
    words = [f"<{token}>".encode() for token in range(vocab_size)]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * len(words))


def _tokenizer(writer: gguf.GGUFWriter, rig: Path, vocab_size: int) -> None:
    path = rig / "tokenizer.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    if stored.get("model", {}).get("type") != "BPE":
        _numbers(writer, vocab_size)
        return
    special = {each["id"]: each["content"] for each in stored["added_tokens"]}
    words = {index: word for word, index in stored["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(index, f"<{index}>") for index in range(vocab_size)])
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([int(kinds[index in special]) for index in range(vocab_size)])
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in stored["model"]["merges"]
    ]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


_Q4_K, _Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K


def _of_q4_k_m(name: str, layers: int) -> gguf.GGMLQuantizationType:
    """The type that a matrix of a dense Llama has in llama.cpp's mixture Q4_K_M.

    The head, and the values and the last product of the layers that it finds most sensitive, have
    more bits (`llama_tensor_get_type` and `use_more_bits` in llama.cpp's llama-quant.cpp).
    """
    if name == "output.weight":
        return _Q6_K
    place = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight", name)
    if place is None:
        return _Q4_K
    layer, eighth = int(place[1]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return _Q6_K if more else _Q4_K


@cache
def _llama_cpp() -> ctypes.CDLL:
    """The library of the package xllamacpp, which has llama.cpp's quantizers."""
    import xllamacpp.xllamacpp as wheel

    return ctypes.CDLL(wheel.__file__)


def _quantized(kind: gguf.GGMLQuantizationType, rows: np.ndarray) -> np.ndarray:
    """A matrix of float32 as llama.cpp quantizes it to one of its types, without an imatrix."""
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty(gguf.quant_shape_to_byte_shape(rows.shape, kind), np.uint8)
    quantize = getattr(_llama_cpp(), f"quantize_{kind.name.lower().replace('_k', '_K')}")
    quantize.restype = ctypes.c_size_t
    count, width = (ctypes.c_int64(size) for size in rows.shape)
    found = quantize(
        rows.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), count, width,
        None,
    )  # fmt: skip
    assert found == out.nbytes, f"llama.cpp wrote {found} bytes of {kind.name}, not {out.nbytes}"
    return out


def _kind(
    name: str, shape: tuple[int, ...], bits: int | str, layers: int
) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or "ffn_gate_inp" in name:  # llama.cpp wants norms and routers so
        return gguf.GGMLQuantizationType.F32
    if isinstance(bits, str):
        return _of_q4_k_m(name, layers)
    return _KINDS[bits if name.startswith("blk.") else 16][0]


def _as(kind: gguf.GGMLQuantizationType, words: Matrix) -> np.ndarray:
    """A matrix as the bytes of a GGUF type; packed weights are not quantized again."""
    if isinstance(words, GptqLinear):
        return words.q4_0()
    if kind == gguf.GGMLQuantizationType.BF16:
        return np.ascontiguousarray(words).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.F32:
        return _wide(words)
    if kind in (_Q4_K, _Q6_K):
        return _quantized(kind, _wide(words))
    return gguf.quants.quantize(_wide(words), kind)


def _layer_bits(rig: Path, config: dict[str, Any], asked: int | str | None) -> int | str:
    """The bits of the layers' weights: those of packed weights, or those asked for."""
    packed = config.get("quantization_config")
    if asked == "Q4_K_M" and config["model_type"] != "llama":
        raise SystemExit(f"{rig}: which experts have more bits in Q4_K_M is not known here")
    if packed is None:
        return 16 if asked is None else asked
    if packed["quant_method"] != "gptq" or packed["bits"] != 4 or packed["desc_act"]:
        raise SystemExit(f"{rig}: of packed rigs those of make_rig.py --bits 4 can be converted")
    if asked not in (None, 4):
        raise SystemExit(f"{rig} has 4 bits already: leave BITS away")
    return 4


def write(rig: Path, out: Path, asked_bits: int | str | None = None) -> None:
    """Converts a rig to a GGUF, matrix by matrix."""
    config = json.loads((rig / "config.json").read_text())
    bits = _layer_bits(rig, config, asked_bits)
    if config["model_type"] not in ("llama", "mixtral"):
        raise SystemExit(f"{rig}: Llama and Mixtral rigs can be converted, not "
                         f"{config['model_type']}")  # fmt: skip
    writer = gguf.GGUFWriter(out, "llama")  # Mixtrals too
    _header(writer, config, bits)
    _tokenizer(writer, rig, config["vocab_size"])
    heads = {"attn_q.": "num_attention_heads", "attn_k.": "num_key_value_heads"}
    for name, shape, _ in _tensors(rig):
        kind = _kind(name, shape, bits, config["num_hidden_layers"])
        if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise SystemExit(f"{rig}: rows of {shape[-1]} are no whole blocks of {kind.name}")
        single = kind == gguf.GGMLQuantizationType.F32
        raw = shape if single else gguf.quant_shape_to_byte_shape(shape, kind)
        n_bytes = int(np.prod(raw)) * (4 if single else 1)
        dtype = np.dtype(np.float32 if single else np.uint8)
        writer.add_tensor_info(name, raw, dtype, n_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, parts in _tensors(rig):
        kind = _kind(name, shape, bits, config["num_hidden_layers"])
        count = next((config[key] for part, key in heads.items() if part in name), None)
        made = []
        for words in parts:
            rows = _as(kind, words if isinstance(words, GptqLinear) else words.reshape(shape[-2:]))
            made.append(_interleaved(rows, count) if count else rows)
        writer.write_tensor_data(made[0] if len(made) == 1 else np.stack(made))
    writer.close()


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        raise SystemExit("give a rig, the file to write, and perhaps the bits of its layers")
    rig, out, *width = sys.argv[1:]
    asked = int(width[0]) if width and width[0].isdigit() else next(iter(width), None)
    if asked is not None and asked not in _KINDS:
        raise SystemExit(f"BITS is {', '.join(map(str, _KINDS))}, not {asked}")
    write(Path(rig), Path(out), asked)
