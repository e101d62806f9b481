"""GGUF files of small models as llama.cpp's converter would write them, by the `gguf` package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "gpt_oss": "gpt-oss",
}  # fmt: skip
PLAIN = {"F32": np.float32, "F16": np.float16}  # numpy has no bfloat16: `gguf` packs it
# (name in GGUF, shape) -> its type; what is written is Kind's
KindOf = Callable[[str, tuple[int, ...]], Kind]


def all_of(kind: Kind) -> KindOf:
    """Every matrix in one type, as far as its rows are whole blocks; vectors and biases and, as
    llama.cpp has it, routers and norms in float32."""

    def kind_of(name: str, shape: tuple[int, ...]) -> Kind:
        block = gguf.GGML_QUANT_SIZES[kind][0]
        wide = len(shape) > 1 and not name.endswith((".bias", "_norm.weight"))
        wide = wide and "ffn_gate_inp" not in name
        fits = wide and shape[-1] % block == 0
        return kind if fits else Kind.F32

    return kind_of


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind_of: KindOf | None = None,
    *,
    tokenizer: Path | None = None,
    unpacked: bool = False,
) -> Path:
    """Writes a model as one GGUF file.

    Args:
        kind_of: all in float32 unless told.
        tokenizer: folder with a tokenizer.json of a byte-level BPE.
        unpacked: write what the blocks mean, in float32.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config, architecture)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for name, tensor in gguf_tensors(model).items():
        kind = kind_of(name, tensor.shape) if kind_of is not None else Kind.F32
        if kind.name in PLAIN:
            writer.add_tensor(name, tensor.astype(PLAIN[kind.name]))
        elif unpacked:
            writer.add_tensor(name, gguf.quants.dequantize(packed(tensor, kind), kind))
        else:
            writer.add_tensor(name, packed(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed(tensor: np.ndarray, kind: Kind) -> np.ndarray:
    """The tensor's blocks, or where `gguf` cannot quantize to them, blocks at random."""
    try:
        return gguf.quants.quantize(tensor, kind)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        return random_blocks(kind, int(np.prod(shape)), seed=tensor.size).reshape(shape)


# where in a block its scales of 16 bits are, by type
_SCALES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,), Kind.MXFP4: (), Kind.IQ1_S: (0,), Kind.IQ1_M: (),
    Kind.IQ2_XXS: (0,), Kind.IQ2_XS: (0,), Kind.IQ2_S: (0,), Kind.IQ3_XXS: (0,), Kind.IQ3_S: (0,),
}  # fmt: skip
PACKED_KINDS = tuple(_SCALES)


def random_blocks(kind: Kind, n_bytes: int, seed: int, scale: float = 0.01) -> np.ndarray:
    """Whole blocks of random codes, with finite scales about as large as `scale`."""
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (n_bytes // size, size), np.uint8)
    factor = {Kind.Q2_K: 1 / 16, Kind.Q3_K: 1 / 32, Kind.Q4_K: 1 / 64, Kind.Q5_K: 1 / 128,
              Kind.Q6_K: 1 / 256, Kind.Q8_0: 1 / 16, Kind.IQ4_NL: 1 / 64,
              Kind.IQ4_XS: 1 / 1024, Kind.IQ2_XXS: 1 / 64, Kind.IQ2_XS: 1 / 64,
              Kind.IQ2_S: 1 / 64, Kind.IQ3_XXS: 1 / 128, Kind.IQ3_S: 1 / 128,
              Kind.IQ1_S: 1 / 8}.get(kind, 1.0)  # fmt: skip
    for place in _SCALES[kind]:
        values = (scale * factor * rng.normal(size=len(blocks))).astype(np.float16)
        blocks[:, place : place + 2] = values.view(np.uint8).reshape(-1, 2)
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(117, 122, len(blocks))  # an exponent
    if kind == Kind.IQ1_M:  # the highest bits of a float16 of 2^-11 to 2^-8
        blocks[:, 55] = blocks[:, 55] & 15 | rng.choice([0x10, 0x90], len(blocks)).astype(np.uint8)
    return blocks.reshape(-1)


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """A model's weights under llama.cpp's names and in its order, float32."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture),
        config.num_hidden_layers,
    )
    found: dict[str, np.ndarray] = {}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and (linear := re.search(r"\.(q|k)_proj\.", name)):
            query = linear[1] == "q"
            heads = config.num_attention_heads if query else config.num_key_value_heads
            values = interleaved(values, heads)
        parts_of = _gpt_oss_parts if config.model_type == "gpt_oss" else _parts
        for stored, part in parts_of(name, values).items():
            renamed = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert renamed is not None, stored
            found[renamed] = part
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            found[f"rope_factors_{which}.weight"] = factors
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config)
    return found


def llama3_factors(config: Any) -> np.ndarray:
    """What each rotary frequency is divided by, computed as llama.cpp's converter does."""
    rope = config.rope_parameters
    size = config.head_dim
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        turns = rope["original_max_position_embeddings"] / (2 * np.pi / frequency)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _parts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """What transformers keeps in one tensor and llama.cpp in two: gate and up of all experts."""
    if name.endswith(".experts.gate_up_proj"):
        stem, half = name.removesuffix("gate_up_proj"), values.shape[1] // 2
        return {
            f"{stem}gate_proj.weight": values[:, :half],
            f"{stem}up_proj.weight": values[:, half:],
        }
    return {name + ".weight" * name.endswith(".experts.down_proj"): values}


def _gpt_oss_parts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Likewise of gpt-oss, whose matrices lie transposed, outputs of gate and up in turns."""
    if name.endswith(".sinks"):
        return {f"{name}.weight": values}
    stem, _, linear = name.rpartition(".experts.")
    if not stem:
        return {name: values}
    stem, is_bias = f"{stem}.experts.", linear.endswith("_bias")
    leaf, rows = ("bias", values) if is_bias else ("weight", values.swapaxes(1, 2))
    if linear.startswith("down_proj"):
        parts = {"down_proj": rows}
    else:
        parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
    return {f"{stem}{part}.{leaf}": np.ascontiguousarray(each) for part, each in parts.items()}


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: both halves of a rotary pair beside each other."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_config(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(whole["rope_theta"]))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if whole["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(whole["rope_type"]))
        writer.add_rope_scaling_factor(whole["factor"])
    if whole["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
    if whole["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = dict(stored["model"]["vocab"])
    special = {each["content"]: each["id"] for each in stored["added_tokens"]}
    words = sorted({**vocab, **special}.items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in words])
    types = [
        gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word, _ in words
    ]
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    for kind, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if settings.get(kind) is not None:
            add({**vocab, **special}[settings[kind]])
    writer.add_add_bos_token(bool(settings.get("add_bos_token", False)))
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def write_small_vocabulary(path: Path, model: str, special: gguf.TokenType | None) -> Path:
    """A file of a vocabulary alone, of pieces ("llama") or of bytes ("gpt2").

    Args:
        special: the type of the special tokens; None leaves out all types.
    """
    named, pieces = ["<s>", "</s>", "<unk>", "<pad>"], model == "llama"
    joined = ["he", "ll", "hell", "hello", "wo", "wor", "wr"]
    letters = [each.replace(" ", "\u2581") for each in "helo wrd"]
    if pieces:
        single = [f"<0x{n:02X}>" for n in range(256)]
        tokens = [*single, *letters, *joined, *named]
    else:
        single = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [*single, *joined, *named]
    types = [
        gguf.TokenType.BYTE if pieces and token in single else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if special is not None:
        writer.add_token_types([*types[: -len(named)], *[special] * len(named)])
    if pieces:
        writer.add_token_scores([-float(n) for n in range(len(tokens))])
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "w o", "wo r", "w r"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_pad_token_id(tokens.index("<pad>"))
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_vocabulary(path: Path, words: Any) -> Path:
    """A file without a model, but with a SentencePiece vocabulary, as of Llama-2."""
    count = words.vocab_size()
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([words.id_to_piece(n) for n in range(count)])
    writer.add_token_scores([words.get_score(n) for n in range(count)])
    writer.add_token_types(
        [
            kinds.UNKNOWN if words.is_unknown(n)
            else kinds.CONTROL if words.is_control(n)
            else kinds.BYTE if words.is_byte(n)
            else kinds.NORMAL
            for n in range(count)
        ]
    )  # fmt: skip
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((count, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(path: Path, count: int) -> Path:
    """The same tensors in parts, as llama.cpp's gguf-split writes them; the first of them."""
    reader = gguf.GGUFReader(path)
    parts = [path.with_name(f"{path.stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts[0]


def rewritten(path: Path, to: Path, packs: bool) -> Path:
    """The file with its matrices in blocks of Q8_0, or with what these mean in float32."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture)
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            of_items = value.types[-1] if len(value.types) > 1 else None
            writer.add_key_value(key, value.contents(), value.types[0], of_items)
    for tensor in reader.tensors:
        kind = all_of(Kind.Q8_0)(tensor.name, tensor.data.shape)
        if kind == Kind.F32:
            writer.add_tensor(tensor.name, tensor.data)
        elif packs:
            writer.add_tensor(tensor.name, packed(np.array(tensor.data), kind), raw_dtype=kind)
        else:
            blocks = packed(np.array(tensor.data), kind)
            writer.add_tensor(tensor.name, gguf.quants.dequantize(blocks, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to
