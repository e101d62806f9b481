"""GGUF files as other programs and older converters write them: opened, or refused in one line.

llama.cpp's converter of today is checked in test_gguf_converted.py; here one file is changed in
each way in which quantizers, uploaders and earlier versions differ from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
from cli_runner import run_cli
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Of
from gguf_files import all_of, packed, write_gguf

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
Fields = dict[str, tuple[Any, Of, Of | None]]
Tensors = dict[str, tuple[np.ndarray, Kind]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of one GGUF file with a tokenizer, as llama.cpp's converter writes it."""
    folder = tmp_path_factory.mktemp("plain")
    model = save_checkpoint(
        folder / "model", byte_llama(hidden_size=64, tie_word_embeddings=True), std=0.1
    )
    save_byte_tokenizer(folder / "model", chat_template=TEMPLATE)
    return write_gguf(model, folder / "plain.gguf", all_of(Kind.Q8_0), tokenizer=folder / "model")


def changed(
    plain: Path,
    to: Path,
    change: Callable[[Fields, Tensors], None],
    *,
    alignment: int | None = None,
) -> Path:
    """The file with other metadata or tensors."""
    reader = gguf.GGUFReader(plain)
    fields: Fields = {
        key: (each.contents(), each.types[0], each.types[-1] if len(each.types) > 1 else None)
        for key, each in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    tensors: Tensors = {
        each.name: (np.array(each.data), each.tensor_type) for each in reader.tensors
    }
    change(fields, tensors)
    writer = gguf.GGUFWriter(to, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (value, kind, of_items) in fields.items():
        writer.add_key_value(key, value, kind, of_items)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if kind.name in ("F32", "F16") else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def answer(path: Path) -> str:
    ran = run_cli("generate", "abc", "-m", path, "--json", "--max-tokens", 6, "--greedy", "-q")
    assert ran.code == 0, ran.err
    text: str = json.loads(ran.out)["text"]
    return text


@pytest.fixture(scope="module")
def expected(plain: Path) -> str:
    return answer(plain)


def as_imatrix(fields: Fields, tensors: Tensors) -> None:
    """What llama-quantize notes of an importance matrix (bartowski's and mradermacher's i1)."""
    fields["quantize.imatrix.file"] = "/models_out/tiny.imatrix", Of.STRING, None
    fields["quantize.imatrix.dataset"] = "/training_dir/calibration.txt", Of.STRING, None
    fields["quantize.imatrix.entries_count"] = 224, Of.INT32, None
    fields["quantize.imatrix.chunks_count"] = 125, Of.INT32, None


def as_uploader(fields: Fields, tensors: Tensors) -> None:
    """What unsloth's, mradermacher's and LM Studio's files say of themselves."""
    for key in ("general.quantized_by", "mradermacher.quantize_version", "general.url"):
        fields[key] = "somebody", Of.STRING, None
    fields["general.tags"] = ["text-generation", "gguf"], Of.ARRAY, Of.STRING
    fields["general.languages"] = ["en"], Of.ARRAY, Of.STRING
    fields["general.file_type"] = 7, Of.UINT32, None
    fields["general.quantization_version"] = 2, Of.UINT32, None


def without_vocabulary_size(fields: Fields, tensors: Tensors) -> None:
    del fields["llama.vocab_size"]


def with_wide_numbers(fields: Fields, tensors: Tensors) -> None:
    """Counts as uint64 or int32, and numbers as float64, as writers in other languages have it."""
    for key, (value, kind, _) in list(fields.items()):
        if kind == Of.UINT32 and key.startswith("llama."):
            fields[key] = value, Of.UINT64 if "count" in key else Of.INT32, None
        if kind == Of.FLOAT32 and key.startswith("llama."):
            fields[key] = value, Of.FLOAT64, None


def without_what_has_a_default(fields: Fields, tensors: Tensors) -> None:
    """Files of 2023 have no lengths of keys and values, and none of a head's turned part."""
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        del fields[f"llama.{key}"]


def with_output(kind: Kind) -> Callable[[Fields, Tensors], None]:
    """A tied table that the quantizer writes a second time, as the output head, in other bits."""

    def change(fields: Fields, tensors: Tensors) -> None:
        data, stored = tensors["token_embd.weight"]
        values = gguf.quants.dequantize(data, stored)
        tensors["output.weight"] = (
            (values, kind) if kind == Kind.F32 else (packed(values, kind), kind)
        )

    return change


def with_plain_frequencies(fields: Fields, tensors: Tensors) -> None:
    """Factors of 1, as llama.cpp's converter writes for a rope_scaling that changes nothing."""
    size = fields["llama.rope.dimension_count"][0] // 2
    tensors["rope_freqs.weight"] = np.ones(size, np.float32), Kind.F32


def with_old_frequencies(fields: Fields, tensors: Tensors) -> None:
    """Files of 2023 have a layer's own frequencies, which nobody reads."""
    for layer in range(fields["llama.block_count"][0]):
        name = f"blk.{layer}.attn_rot_embd.freqs"
        tensors[name] = np.ones(8, np.float32), Kind.F32


def with_templates(fields: Fields, tensors: Tensors) -> None:
    """Several chat templates by name beside the plain one."""
    fields["tokenizer.chat_templates"] = ["tool_use", "rag"], Of.ARRAY, Of.STRING
    for name in ("tool_use", "rag"):
        fields[f"tokenizer.chat_template.{name}"] = "{{ 1 / 0 }}", Of.STRING, None


def with_a_copy_of_tokenizer_json(fields: Fields, tensors: Tensors) -> None:
    """candle's and mlx's writers put the whole tokenizer.json into the metadata."""
    fields["tokenizer.huggingface.json"] = json.dumps({"version": "1.0"}), Of.STRING, None


def with_the_old_type_of_scaling(fields: Fields, tensors: Tensors) -> None:
    fields["llama.rope.scaling.type"] = "none", Of.STRING, None


def with_linear_scale_of_one(fields: Fields, tensors: Tensors) -> None:
    """Files of 2023 name a factor without a type."""
    fields["llama.rope.scale_linear"] = 1.0, Of.FLOAT32, None


def with_other_sides(fields: Fields, tensors: Tensors) -> None:
    fields["llama.tensor_data_layout"] = "Meta AI original pth", Of.STRING, None
    fields["tokenizer.ggml.seperator_token_id"] = 2, Of.UINT32, None
    fields["tokenizer.ggml.add_eos_token"] = False, Of.BOOL, None
    fields["tokenizer.ggml.eot_token_id"] = 2, Of.UINT32, None


SAME: dict[str, Callable[[Fields, Tensors], None]] = {
    each.__name__: each
    for each in (
        as_imatrix, as_uploader, without_vocabulary_size, with_wide_numbers,
        without_what_has_a_default, with_plain_frequencies, with_old_frequencies, with_templates,
        with_a_copy_of_tokenizer_json, with_the_old_type_of_scaling, with_linear_scale_of_one,
        with_other_sides,
    )
} | {"with_its_table_as_output": with_output(Kind.F32)}  # fmt: skip


@pytest.mark.parametrize("way", SAME)
def test_it_answers_as_llama_cpps_own_file(
    way: str, plain: Path, expected: str, tmp_path: Path
) -> None:
    assert answer(changed(plain, tmp_path / "m.gguf", SAME[way])) == expected


@pytest.mark.parametrize("alignment", [8, 4096])
def test_any_alignment_will_do(alignment: int, plain: Path, expected: str, tmp_path: Path) -> None:
    path = changed(plain, tmp_path / "m.gguf", lambda f, t: None, alignment=alignment)
    assert answer(path) == expected
