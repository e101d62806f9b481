"""The config.json that a GGUF file stands for, from its metadata. Torch-free: `plan` asks for it.

transformers has a table of its own for this (integrations/ggml.py), which leaves out what changes
results: scaled rotary frequencies, windows, soft caps, the width of experts. A test holds this one
against it where both speak. What no file tells (Gemma's scale of queries) is as in llama.cpp's
src/models; the metadata's keys are listed in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import GgufFile, GgufTensor, shown
from specexec_cli.gguf.counts import expert_count, layer_count

Config = dict[str, Any]

# llama.cpp's name of an architecture -> transformers' model_type
MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3",
}  # fmt: skip
_WHOLE = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_MOST = 1 << 31  # no size of a model is larger
# Llama 3.1 and later: of the wavelengths in a context of so many tokens, the shortest quarter stays
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>",
)  # fmt: skip
_FACTOR_ERROR = 1e-4  # float32's, where a list of factors is that of Llama 3


class _Metadata:
    """The metadata of one architecture, of which every value is checked as it is asked for."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.metadata.get("general.architecture")

    def refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {reason}: get another file of the model")

    def value(self, key: str) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 up; a list of equal ones counts as one."""
        value = self.value(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 <= value < _MOST:
            what = "has no" if value is None else f"says {shown(value)} as"
            raise self.refusal(f"its metadata {what} '{self.architecture}.{key}'")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value):
            what = "has no" if value is None else f"says {shown(value)} as"
            raise self.refusal(f"its metadata {what} '{self.architecture}.{key}'")
        return float(value)

    def words(self) -> dict[str, int]:
        """The vocabulary: token -> its number."""
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        return {word: n for n, word in enumerate(tokens)} if isinstance(tokens, list) else {}

    def token(self, key: str) -> int | None:
        value = self._file.metadata.get(f"tokenizer.ggml.{key}")
        return value if type(value) is int else None


def gguf_config(file: GgufFile) -> Config:
    """transformers' config of the model in a GGUF file, as config.json would hold it.

    Raises:
        CheckpointError: an architecture that is not known, or a value that is missing or absurd.
    """
    metadata = _Metadata(file)
    architecture = metadata.architecture
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise CheckpointError(
            f"{file.path}: GGUF files of architecture {shown(architecture)} are not supported; "
            f"supported are {', '.join(MODEL_TYPES)}. Use the model's safetensors files"
        )
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise metadata.refusal("it has no table of embeddings 'token_embd.weight'")
    config: Config = {"model_type": MODEL_TYPES[architecture]}
    config |= {name: metadata.whole(key) for key, name in _WHOLE.items()}
    if not config["num_attention_heads"]:
        raise metadata.refusal("a model of 0 attention heads has no text")
    _check_count(metadata, "layers", config["num_hidden_layers"], layer_count(file))
    config |= {
        "num_key_value_heads": metadata.whole(
            "attention.head_count_kv", config["num_attention_heads"]
        ),
        "head_dim": metadata.whole(
            "attention.key_length", config["hidden_size"] // config["num_attention_heads"]
        ),
        "intermediate_size": metadata.whole("feed_forward_length", 0),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, metadata, config),
        "bos_token_id": metadata.token("bos_token_id"),
        "eos_token_id": _ends(metadata),
        "pad_token_id": metadata.token("padding_token_id"),
        "dtype": _dtype(file),
    }
    rotary = metadata.whole("rope.dimension_count", config["head_dim"])
    if architecture != "phi3" and rotary != config["head_dim"]:
        raise metadata.refusal(
            f"it turns {rotary} of the {config['head_dim']} numbers of a head by its position, "
            f"which is not supported for {architecture}"
        )
    own = _OWN.get(architecture)
    return config if own is None else config | own(file, metadata, config)


def _check_count(metadata: _Metadata, what: str, said: int, found: int | None) -> None:
    """Refuses a count that the tensors do not bear out: memory is taken for as many as it says."""
    if said != found:
        has = "lacks some of its" if found is None else f"has tensors of {found}"
        raise metadata.refusal(f"its metadata says {said} {what}, the file {has} {what}")


def _experts(file: GgufFile, metadata: _Metadata) -> int:
    """The number of experts of a layer, held against the tensors."""
    count = metadata.whole("expert_count")
    _check_count(metadata, "experts", count, expert_count(file))
    return count


def _ends(metadata: _Metadata) -> list[int] | int | None:
    """What ends a text: the tokens that a file calls so, and those whose spelling says it, which
    llama.cpp goes by as well (src/llama-vocab.cpp): many files name but one."""
    found = [metadata.token("eos_token_id"), metadata.token("eot_token_id")]
    spelled = metadata.words()
    found += [spelled[word] for word in _ENDS if word in spelled]
    ids = list(dict.fromkeys(each for each in found if each is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _dtype(file: GgufFile) -> str:
    """What to compute in on a GPU: the plain tensors' dtype, or bfloat16 for packed ones."""
    found: dict[str, int] = {}
    for tensor in file.tensors.values():
        found[tensor.type.name] = found.get(tensor.type.name, 0) + tensor.stop - tensor.start
    most = max(found, key=lambda name: found[name], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _llama(file: GgufFile, metadata: _Metadata, config: Config) -> Config:
    own: Config = {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if metadata.whole("expert_count", 0):
        own = {
            "model_type": "mixtral",
            "num_local_experts": _experts(file, metadata),
            "num_experts_per_tok": metadata.whole("expert_used_count"),
            "sliding_window": None,
        }
    return own


def _qwen3moe(file: GgufFile, metadata: _Metadata, config: Config) -> Config:
    return {
        "num_experts": _experts(file, metadata),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp does so whatever the model's maker said
    }


def _gemma2(file: GgufFile, metadata: _Metadata, config: Config) -> Config:
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=46),
    }


def _gemma3(file: GgufFile, metadata: _Metadata, config: Config) -> Config:
    pattern = metadata.whole("attention.sliding_window_pattern", 6)
    layers = range(1, config["num_hidden_layers"] + 1)
    local = metadata.number("rope.freq_base_swa", 10000.0)
    kinds = [
        "full_attention" if pattern and number % pattern == 0 else "sliding_attention"
        for number in layers
    ]
    return {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": kinds,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scale(config, layers_of_27b=62),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _query_scale(config: Config, layers_of_27b: int) -> int:
    """What queries are divided by the root of, which llama.cpp knows from the number of layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(file: GgufFile, metadata: _Metadata, config: Config) -> Config:
    rotary = metadata.whole("rope.dimension_count", config["head_dim"])
    original = metadata.whole(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    rope = {**config["rope_parameters"], "partial_rotary_factor": rotary / config["head_dim"]}
    return {
        "sliding_window": metadata.whole("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


_OWN: Mapping[str, Callable[[GgufFile, _Metadata, Config], Config]] = {
    "llama": _llama, "qwen3moe": _qwen3moe, "gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3,
}  # fmt: skip


def _rope(file: GgufFile, metadata: _Metadata, config: Config) -> Config:
    """The rotary frequencies: plain, or scaled as metadata or tensors of factors say."""
    theta = metadata.number("rope.freq_base", 10000.0)
    if theta <= 0:
        raise metadata.refusal(f"a rotary base of {theta} gives no frequencies")
    if "rope_freqs.weight" in file.tensors:
        factors = _floats(file.tensors["rope_freqs.weight"])
        return {"rope_theta": theta, **_factored(factors, theta, config)}
    long, short = (file.tensors.get(f"rope_factors_{each}.weight") for each in ("long", "short"))
    if long is not None or short is not None:
        if long is None or short is None:
            raise metadata.refusal("of its rotary factors for long and short texts it has but one")
        rope = {
            "rope_type": "longrope",
            "long_factor": _floats(long),
            "short_factor": _floats(short),
            "original_max_position_embeddings": metadata.whole(
                "rope.scaling.original_context_length"
            ),
            "rope_theta": theta,
        }
        if metadata.value("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = metadata.number("rope.scaling.attn_factor")
        return rope
    kind = metadata.value("rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = metadata.number("rope.scaling.factor")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "linear":
        return rope
    if kind != "yarn":
        raise metadata.refusal(f"rotary frequencies scaled by {shown(kind)} are not supported")
    rope["original_max_position_embeddings"] = metadata.whole(
        "rope.scaling.original_context_length"
    )
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if metadata.value(f"rope.scaling.{key}") is not None:
            rope[name] = metadata.number(f"rope.scaling.{key}")
    if metadata.value("rope.scaling.attn_factor") is not None:
        # llama.cpp multiplies YaRN's own factor by it (src/llama-context.cpp), and overwrites
        # yarn_attn_factor; transformers puts its attention_factor in the place of YaRN's own
        own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        rope["attention_factor"] = own * metadata.number("rope.scaling.attn_factor")
    return rope


def _factored(factors: list[float], theta: float, config: Config) -> Config:
    """Parameters under which transformers divides each frequency by its factor.

    llama.cpp's converter writes Llama 3's rule as a list of what it comes to.
    """
    factor = max(factors)
    expected = [
        _llama3_factor(theta, index / len(factors), factor) for index in range(len(factors))
    ]
    if all(
        abs(one - other) <= _FACTOR_ERROR * other
        for one, other in zip(factors, expected, strict=True)
    ):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # any list, in the one form of transformers' that takes one
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_factor(theta: float, share: float, factor: float) -> float:
    """What Llama 3 divides a frequency by. Source: Llama 3.1's reference code, `apply_scaling`."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta**share)
    if turns >= high:
        return 1.0
    if turns <= low:
        return factor
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


def _floats(tensor: GgufTensor) -> list[float]:
    """The factors in a short tensor in float32.

    Raises:
        CheckpointError: it is not short, of another type, or what it has are no factors.
    """
    count = (tensor.stop - tensor.start) // 4
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or count > 4096:
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}' is no short list of float32: "
            "the file is damaged, download it again"
        )
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            factors = list(struct.unpack(f"<{count}f", file.read(4 * count)))
    except (OSError, struct.error) as error:
        raise CheckpointError(f"cannot read {tensor.path}: {error}") from None
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}' has factors that are not above 0: "
            "the file is damaged, download it again"
        )
    return factors
