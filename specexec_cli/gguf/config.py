"""Makes transformers' config of a GGUF file from its metadata. Imports no torch: `plan` uses it.

transformers' own table for this (integrations/ggml.py) leaves out values that change results:
scaled rotary frequencies, windows, soft caps, the width of experts. A test compares both tables
where they overlap. Values that no file has (Gemma's scale of queries) are as in llama.cpp's
src/models; the metadata's keys are listed in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from typing import Any

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.architectures import ARCHITECTURES, NOT_READ, Described
from specexec_cli.gguf.container import GgufFile, shown
from specexec_cli.gguf.counts import layer_count
from specexec_cli.gguf.metadata import Metadata
from specexec_cli.gguf.rotary import rotary_parameters

Config = dict[str, Any]

ASSISTANT = "gemma4-assistant"  # drafts for a Gemma 4, and has layers as its target

_WHOLE = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
# values of a model that sees which its part for text does not tell
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "dtype")
# llama.cpp's list but for </s>, which is a piece of plain text to many vocabularies
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
# where a reply has several messages, <|end|> ends only one of them: gpt-oss, Solar Open
_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def gguf_config(file: GgufFile) -> Config:
    """transformers' config of the model in a GGUF file, as config.json would hold it.

    Raises:
        CheckpointError: the architecture is not known, or a value is missing or absurd.
    """
    metadata = Metadata(file)
    architecture = metadata.architecture
    if architecture == ASSISTANT:
        return {
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": metadata.whole("embedding_length_out"),
            # all of its layers draft, and none is behind others
            "text_config": _described(file, metadata, ARCHITECTURES["gemma4"], drafting=0),
        }
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        reason = NOT_READ.get(str(architecture))
        raise CheckpointError(
            f"{file.path}: GGUF files of architecture {shown(architecture)} are not supported"
            + (f": {reason}. Use the model's safetensors files" if reason else
               ". docs/using.md lists those that are; docs/architectures.md lists the types whose "
               "safetensors files are read")
        )  # fmt: skip
    drafting = metadata.whole("nextn_predict_layers", 0)  # layers behind the others (MTP)
    return _described(file, metadata, ARCHITECTURES[architecture], drafting)


def _described(file: GgufFile, metadata: Metadata, described: Described, drafting: int) -> Config:
    """The config of a file whose architecture is known.

    Args:
        drafting: how many of its layers are behind the others.
    """
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise metadata.refusal("it has no table of embeddings 'token_embd.weight'")
    config: Config = {"model_type": described.model_type}
    config |= {
        name: metadata.whole(key, uneven=described.uneven and key.endswith("head_count"))
        for key, name in _WHOLE.items()
    }
    if not config["num_attention_heads"] and described.attends:
        raise metadata.refusal("a model of 0 attention heads has no text")
    found = layer_count(file)
    config["num_hidden_layers"] -= min(drafting, config["num_hidden_layers"])
    if found != config["num_hidden_layers"] + drafting:
        metadata.counted("block_count", "layers", found, less=drafting)
    if not config["num_hidden_layers"]:
        raise metadata.refusal("a model of 0 layers has no text")
    if described.attends:
        config |= _attention(file, metadata, config, described)
    config |= {
        "intermediate_size": metadata.whole("feed_forward_length", 0, uneven=described.uneven),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token("bos_token_id"),
        "eos_token_id": _ends(metadata),
        "pad_token_id": metadata.token("padding_token_id"),
        "dtype": _dtype(file),
    }
    _check_experts(metadata)
    config |= described.values(file, metadata)
    if described.attends:
        _turn_part_of_heads(metadata, config, described)
    if described.own is not None:
        config |= described.own(file, metadata, config)
    config = {name: value for name, value in config.items() if name not in described.without}
    if drafting:
        config["num_nextn_predict_layers"] = drafting
    if not described.sees:
        return config
    kind = {"model_type": config.pop("model_type")}
    whole = {name: config[name] for name in _OF_THE_WHOLE}
    # their classes have defaults for what there is none of
    text = {name: value for name, value in config.items() if value is not None}
    return {**kind, **whole, "text_config": text}


def _attention(file: GgufFile, metadata: Metadata, config: Config, described: Described) -> Config:
    """Heads, and how they are turned by their positions."""
    heads = config["num_attention_heads"]
    return {
        "num_key_value_heads": metadata.whole(
            "attention.head_count_kv", heads, uneven=described.uneven
        ),
        "head_dim": metadata.whole("attention.key_length", config["hidden_size"] // heads),
        "rope_parameters": rotary_parameters(file, metadata, config),
    }


def _check_experts(metadata: Metadata) -> None:
    """Checks the numbers of a mixture, which modelling code takes as they are.

    Raises:
        CheckpointError: more experts, or groups of them, are chosen than there are, or none.
    """
    experts = metadata.whole("expert_count", 0)
    if not experts:
        return
    chosen = metadata.whole("expert_used_count", 1)
    groups = metadata.whole("expert_group_count", 1) or 1
    of_groups = metadata.whole("expert_group_used_count", 1)
    if groups == 1:  # files say 0 where experts are in no groups
        of_groups = max(of_groups, 1)
    if not 1 <= chosen <= experts or experts % groups or not 1 <= of_groups <= groups:
        raise metadata.refusal(
            f"its metadata say that {chosen} of {experts} experts are chosen, in {of_groups} of "
            f"{groups} groups"
        )


def _turn_part_of_heads(metadata: Metadata, config: Config, described: Described) -> None:
    """Enters into the config how much of a head is turned by its position."""
    rotary = metadata.whole("rope.dimension_count", config["head_dim"])
    in_parts = described.rotary == "parts of heads"
    if described.rotary == "its own" or (rotary == config["head_dim"] and not in_parts):
        return
    if not in_parts or not config["head_dim"]:
        raise metadata.refusal(
            f"it turns {rotary} of the {config['head_dim']} numbers of a head by its position, "
            f"which is not supported for {metadata.architecture}"
        )
    # also where heads are turned whole: these types of transformers turn half
    config["rope_parameters"]["partial_rotary_factor"] = rotary / config["head_dim"]


def _ends(metadata: Metadata) -> list[int] | int | None:
    """The tokens that end a text: those that the file names, and those with a known spelling.

    Many files name only one, so llama.cpp goes by the spelling as well (src/llama-vocab.cpp).
    """
    found = [metadata.token(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    spelled = metadata.ids_of(_ENDS)
    ends = [word for word in _ENDS if word in spelled]
    if any(names <= {*ends} for names in _OF_MESSAGES):
        ends = [word for word in ends if word != "<|end|>"]
    found += [spelled[word] for word in ends]
    ids = list(dict.fromkeys(each for each in found if each is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _dtype(file: GgufFile) -> str:
    """The dtype to compute in on a GPU: that of most bytes, or bfloat16 if they are packed."""
    found: dict[str, int] = {}
    for tensor in file.tensors.values():
        found[tensor.type.name] = found.get(tensor.type.name, 0) + tensor.stop - tensor.start
    most = max(found, key=lambda name: found[name], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")
