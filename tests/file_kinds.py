"""Every kind of file and answer that is read, each with a right one and what reads it.

Whatever the bytes, reading ends in a value or in a SpecexecError of one short line; tests try a few
mutants of each kind, and scripts/fuzz_files.py many.
"""

from __future__ import annotations

import atexit
import json
import random
import shutil
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from bench_rows import case, row, step
from fake_hub import FakeHub, asked_instead, running
from mutants import (
    mutated,
    mutated_json,
    mutated_lines,
    mutated_safetensors,
    mutated_toml,
    mutated_torch_file,
)

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.config import GenerationConfig, SamplingChoice, SamplingConfig
from specexec_cli.errors import SpecexecError

Mutate = Callable[[bytes, random.Random], bytes]
MOST_MESSAGE = 1000  # characters
REPO = "org/name"


@dataclass(frozen=True)
class Sample:
    """A right file, and what reads other bytes in its place."""

    raw: bytes
    read: Callable[[bytes], object]
    mutate: Mutate


KINDS: dict[str, Callable[[Path], Sample]] = {}


def kind(make: Callable[[Path], Sample]) -> Callable[[Path], Sample]:
    """Adds a kind under its function's name; it is given a folder of its own."""
    KINDS[make.__name__] = make
    return make


def outcome(sample: Sample, data: bytes) -> str:
    """The message of a refusal; empty where the bytes were read.

    Raises:
        Exception: another one than a SpecexecError, or its message is no short line.
    """
    try:
        sample.read(data)
    except SpecexecError as error:
        message = str(error)
        assert message, "a refusal says why"
        assert message.isprintable(), message
        assert len(message) <= MOST_MESSAGE, message
        return message
    return ""


def at(path: Path, read: Callable[[], object], mutate: Mutate = mutated_json) -> Sample:
    """A sample that is one file."""

    def placed(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return Sample(path.read_bytes(), placed, mutate)


def whole(raw: bytes, rng: random.Random) -> bytes:
    """Damages anywhere."""
    return mutated(raw, len(raw), rng)


# --- What is kept between sessions ---


@kind
def file_hashes(folder: Path) -> Sample:
    from specexec_cli.hosts.files import load_hashes
    from specexec_cli.kept import write_json

    path = folder / "file-hashes.json"
    write_json(path, {str(folder / "model.safetensors"): [12, 1_700_000_000, "ab" * 32]})
    return at(path, lambda: load_hashes(path))


@kind
def rates(folder: Path) -> Sample:
    from specexec_cli.planning.machine_rates import Rates, load_rates, save_rates

    path = folder / "rates.json"
    flops = {"float32": ((1, 1e9), (64, 1e11)), "bfloat16, 4 bits": ((1, 1e9),)}
    save_rates(
        Rates(host="h", cpu="c", measured="2026-01-01", ssd_bytes_per_s=2e9, flops=flops), path
    )
    return at(path, lambda: load_rates(path))


@kind
def runs(folder: Path) -> Sample:
    from specexec_cli.planning.expected_speed import Run, keep_run, load_runs

    path = folder / "runs.json"
    run = Run(date="2026-01-01", offload="ssd", device="cpu", tokens=20, passes=4, seconds=2.5)
    for _ in range(3):
        keep_run(path, run)
    return at(path, lambda: [each.tokens_per_s for each in load_runs(path)])


@kind
def learned(folder: Path) -> Sample:
    from specexec_cli.drafting.learned import Learned
    from specexec_cli.drafting.scoring import DraftScorer
    from specexec_cli.sampling import Sampler

    path, found = folder / "learned.json", Learned()
    found.keep("greedy", DraftScorer(Sampler(SamplingConfig()), "noise").trust)
    for rows in (10, 20, 30):
        found.cost.observe(rows, 2, 0.1, 1.0)
    found.save(path, "machine")
    return at(path, lambda: Learned().load(path, "machine"))


@kind
def expert_counts(folder: Path) -> Sample:
    from specexec_cli.offload.expert_scores import ExpertScores
    from specexec_cli.session.expert_counts import ExpertCounts

    store = cast(Any, mock.Mock(scores=ExpertScores(3, 4, 2)))
    cache = "specexec_cli.session.expert_counts.user_cache_path"
    with mock.patch(cache, return_value=folder):
        kept = ExpertCounts("model", lambda text: None)
    kept.save(store)
    return at(kept._path, lambda: kept.load(store))


@kind
def rows_of_a_text(folder: Path) -> Sample:
    from contextlib import closing, suppress

    from specexec_cli.errors import StreamError
    from specexec_cli.prefixes.kept_file import (
        DamagedError,
        Form,
        KeptFile,
        Staging,
        write_file,
    )

    path, key, staging = folder / "a.rows", bytes(32), Staging()
    forms = [Form("BF16", (1, 2, 64, 8)), Form("F32", (3, 5))]
    tensors = [random.Random(form.n_bytes).randbytes(form.n_bytes) for form in forms]

    def fill(index: int, view: memoryview) -> None:
        view[:] = tensors[index]

    def read() -> None:
        with suppress(DamagedError, StreamError), closing(KeptFile(path, key, staging)) as file:
            assert file.forms == forms
            for index, view in file.tensors():
                assert view == tensors[index]

    write_file(path, key, forms, fill, staging)
    return at(path, read, whole)


@kind
def classifier(folder: Path) -> Sample:
    from toys import classifier as toy

    from specexec_cli.drafting.classifier import load_classifier

    toy().save(folder, {"target": "t", "draft": "d"})
    return at(folder / "disco.json", lambda: load_classifier(folder, "t", "d"))


@kind
def transcript(folder: Path) -> Sample:
    from specexec_cli.chat.transcript import Transcript, load

    path = folder / "chat.jsonl"
    written = Transcript(path, "toy")
    for record in (
        {"role": "system", "content": "s"}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "finish_reason": "eos"}, {"drop": [0, 2]},
    ):  # fmt: skip
        written.append(record)
    written.close()
    return at(path, lambda: load(path), mutated_lines)


@kind
def kernel_cache(folder: Path) -> Sample:
    from specexec_kernels import kernel_files

    with mock.patch.dict("os.environ", {"SPECEXEC_KERNEL_CACHE": str(folder)}):
        kernel_files.keep("symbol", bytes(range(256)))

    def read() -> None:
        with mock.patch.dict("os.environ", {"SPECEXEC_KERNEL_CACHE": str(folder)}):
            assert kernel_files.read("symbol") in (None, bytes(range(256)))

    return at(folder / "symbol.o", read, whole)


# --- What a user gives ---


@kind
def models_toml(folder: Path) -> Sample:
    from specexec_cli.catalog.registry import load_registry
    from specexec_cli.planning.sizes import architecture_bytes

    path = folder / "models.toml"
    path.write_text("""use = "mine"
[names]
mine = "couple"
[models.big]
repo = "org/big"
model_type = "mixtral"
dtype = "float16"
quantization = "gptq"
bits = 4
group_size = 128
context = 4096
params = 46000000000
chat = true
tokenizer = "t"
shape = { hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 4, vocab_size = 100, \
num_local_experts = 4 }
counted = { hidden = 64, vocab = 100, outside = 12864, head = 6400, table = 6400, experts = 4, \
chosen = 2, layers = [{ at = "0-1", dense = [[4, 64, 64]], experts = [[8, 64, 32]], kv = 128 }] }
[models.small]
repo = "./small"
[pairs.couple]
target = "big"
draft = "small"
budget = 8
depth = 4
tokens_per_pass = 2.5
tasks = ["chat"]
[heads.top]
target = "big"
repo = "org/head"
params = 400000000
license = "mit"
""")

    def read() -> None:
        found = load_registry(path)
        for model in found.models.values():
            if model.name in ("big", "small"):
                assert model.size_bytes != 0
                if config := model.config_json():
                    architecture_bytes(config, model.counts(config))
        for head in found.heads.values():
            found.heads_for(head.target)
            assert head.model.size_bytes != 0
        for pair in found.pairs.values():
            found.drafts_for(pair.target)
            found.pair_for_target(pair.target)

    return at(path, read, mutated_toml)


@kind
def hosts_toml(folder: Path) -> Sample:
    from specexec_cli.planning.hosts import read_hosts

    path = folder / "hosts.toml"
    path.write_text(
        'listen = "192.168.1.10:7420"\nwait_s = 30\n\n[[host]]\nname = "attic"\nram_gb = 32\n'
        'link_gbit_s = 2.5\n\n[[host]]\nname = "cellar"\nram_gb = 16.5\nlayers = 4\n'
        "delay_ms = 0.3\n"
    )

    def read() -> None:
        for entry in read_hosts(path).hosts:
            entry.described()

    return at(path, read, mutated_toml)


@kind
def jobs(folder: Path) -> Sample:
    from specexec_cli.engine.jobs import read_jobs

    path = folder / "prompts.jsonl"
    lines = [
        {"prompt": "import os"}, {"id": "b", "prompt": "x", "temperature": 0.8, "seed": 5},
        {"id": "c", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3,
         "stop": ["a"]},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read() -> None:
        text = path.read_text("utf-8", "replace")
        found = read_jobs(text, "prompts.jsonl", SamplingChoice(), GenerationConfig())
        assert all(job.made_of(["target"]) for job in found)

    return at(path, read, mutated_lines)


@kind
def job_results(folder: Path) -> Sample:
    from specexec_cli.engine.jobs import ResultFile

    path, made_of = folder / "texts.jsonl", {1: "a", "b": "c"}
    results = ResultFile(path, made_of)
    for own_id, made in made_of.items():
        results.add({"id": own_id, "text": "é", "tokens": [1, 2], "made_of": made})
    results.close()
    return at(path, lambda: ResultFile(path, made_of).close(), mutated_lines)


@kind
def bench_results(folder: Path) -> Sample:
    from specexec_cli.lab.bench.results import ResultsFile
    from specexec_cli.lab.bench.summary import summarize

    path = folder / "results.jsonl"
    results = ResultsFile(path)
    for budget in (4, 8):
        results.append(row(case("specexec", budget, 2), [step(2, 4), step(3, 4)], 1.0))
    return at(path, lambda: summarize(list(ResultsFile(path).rows.values())), mutated_lines)


@kind
def dataset(folder: Path) -> Sample:
    from specexec_cli.lab.bench.datasets import load_dataset

    path = folder / "prompts.json"
    path.write_text(json.dumps([["a", "text"], "text", {"prompt": "x", "id": 3}, {"text": "y"}]))
    return at(path, lambda: load_dataset(str(path), data_folder=folder, count=9).sha256)


@kind
def measured_numbers(folder: Path) -> Sample:
    from specexec_cli.lab.commands.simulate import _numbers

    path = folder / "measured.json"
    content = {"target": {"tpot_ms": 3.0}, "draft": {"tpot_ms": 1.0}, "acceptance": {"rate": 0.5}}
    path.write_text(json.dumps(content))
    given = {"target_ms": None, "draft_ms": None, "acceptance": None}
    return at(path, lambda: _numbers(cast(Any, given), path))


@kind
def disco_labels(folder: Path) -> Sample:
    from specexec_cli.lab.bench.policy_labels import TOP, LabelsFile

    path = folder / "labels.jsonl"
    line = {"key": "k", "signals": [[0.5] * (TOP + 1)], "accepted": [True], "conformity": [0.5]}
    path.write_text((json.dumps(line) + "\n") * 2)
    return at(path, lambda: LabelsFile(path), mutated_lines)


# --- Checkpoints ---


def _llama(folder: Path) -> Path:
    from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint

    save_checkpoint(folder, byte_llama(num_hidden_layers=1))
    save_byte_tokenizer(folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def _build(folder: Path) -> None:
    """All that opening a model does before a weight is read."""
    from specexec_cli.models.packing import read_packing
    from specexec_cli.models.skeleton import build_skeleton
    from specexec_cli.offload.store import read_checkpoint
    from specexec_cli.planning.sizes import checkpoint_bytes

    checkpoint = read_checkpoint(folder)
    build_skeleton(checkpoint, read_packing(checkpoint, lambda text: None))
    checkpoint_bytes(checkpoint)


@kind
def config(folder: Path) -> Sample:
    _llama(folder)
    return at(folder / "config.json", lambda: _build(folder))


@kind
def config_of_a_mixture(folder: Path) -> Sample:
    from checkpoints import architecture, save_checkpoint

    save_checkpoint(folder, architecture("qwen3-moe"))
    return at(folder / "config.json", lambda: _build(folder))


@kind
def sizes(folder: Path) -> Sample:
    """config.json of many types, of models.toml and of tests, before anything is downloaded."""
    from checkpoints import ARCHITECTURES as TINY
    from checkpoints import architecture

    from specexec_cli.catalog.registry import load_registry
    from specexec_cli.planning.sizes import architecture_bytes

    configs = {
        model.model_type: model.config_json() | {"num_hidden_layers": 1}  # quick to build
        for model in load_registry().models.values()
        if "layer_types" not in model.shape and "n_layer" not in model.shape
    }
    raws = [json.dumps(each).encode() for each in configs.values()]
    raws += [architecture(name).to_json_string().encode() for name in TINY]

    def mutate(raw: bytes, rng: random.Random) -> bytes:
        return mutated_json(rng.choice(raws), rng)

    def read(data: bytes) -> None:
        from specexec_cli.catalog.hub import fetch_config

        (folder / "config.json").write_bytes(data)
        found = architecture_bytes(fetch_config(ModelEntry(name="m", repo=str(folder))))
        assert found.total >= 0

    return Sample(raws[0], read, mutate)


def _packed(folder: Path, quantized: Mapping[str, Any], beside: str = "") -> Sample:
    """A checkpoint whose quantization_config is the sample."""
    config_path = folder / "config.json"
    content = json.loads(config_path.read_text())
    if beside:
        content.pop("quantization_config", None)
        config_path.write_text(json.dumps(content))

    def read(data: bytes) -> None:
        if beside:
            (folder / beside).write_bytes(data)
        else:
            rest = json.dumps({**content, "quantization_config": None}).encode()
            config_path.write_bytes(rest.replace(b'"quantization_config": null',
                                                 b'"quantization_config": ' + data))  # fmt: skip
        _build(folder)

    return Sample(json.dumps(quantized).encode(), read, mutated_json)


@kind
def gptq_config(folder: Path) -> Sample:
    from quantized_checkpoints import save_quantized

    _, packed = save_quantized(folder)
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    more = {
        "dynamic": {r"-:.*\.nothing": {}, r"+:.*\.none": {"bits": 8}}, "desc_act": False,
        "meta": {"quantizer": ["gptqmodel:1.0"]}, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return _packed(packed, {**settings, **more})


@kind
def quantize_config(folder: Path) -> Sample:
    from quantized_checkpoints import save_quantized

    _, packed = save_quantized(folder)
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    return _packed(packed, settings, beside="quantize_config.json")


@kind
def compressed_tensors_config(folder: Path) -> Sample:
    from row_checkpoints import SMALL, save_row_packed

    _, packed = save_row_packed(folder, "w4a16")
    return _packed(packed, {**SMALL["w4a16"].settings, "ignore": ["lm_head", r"re:.*\.gate$"]})


@kind
def bitsandbytes_state(folder: Path) -> Sample:
    from row_checkpoints import save_row_packed
    from safetensors.torch import load_file, save_file

    _, packed = save_row_packed(folder, "nf4-double")
    path = packed / "model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("__nf4"))

    def read(data: bytes) -> None:
        import torch

        state = torch.frombuffer(bytearray(data[:100_000] or b" "), dtype=torch.uint8)
        save_file({**tensors, name: state}, path, {"format": "pt"})
        _build(packed)

    return Sample(bytes(tensors[name].tolist()), read, mutated_json)


def _drafts(folder: Path) -> Callable[[], object]:
    """Reads the EAGLE-3 head in a folder, and tells its size where its weights are not here."""
    from eagle_toys import eagle_toy, save_target

    from specexec_cli.models.packing import read_packing
    from specexec_cli.models.skeleton import build_skeleton
    from specexec_cli.offload.eagle import eagle_checkpoint, is_eagle
    from specexec_cli.offload.store import read_checkpoint
    from specexec_cli.planning.chosen_models import sized

    save_target(folder / "target")
    target = sized(ModelEntry(name="t", repo=str(folder / "target")), offline=True)
    eagle_toy().save(folder / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    (folder / "hub").mkdir()

    def read() -> None:
        shutil.copy(folder / "head" / "config.json", folder / "hub")
        sized(ModelEntry(name="h", repo=str(folder / "hub")), offline=True, target=target)
        found = read_checkpoint(folder / "head")
        if is_eagle(found.config):  # else it is a damaged Llama, of which there are kinds above
            found = eagle_checkpoint(found, target.config)
            build_skeleton(found, read_packing(found, lambda text: None))

    return read


@kind
def eagle_config(folder: Path) -> Sample:
    read = _drafts(folder)
    return at(folder / "head" / "config.json", read)


@kind
def eagle_header(folder: Path) -> Sample:
    read = _drafts(folder)
    return at(folder / "head" / "model.safetensors", read, mutated_safetensors)


@kind
def block_head_config(folder: Path) -> Sample:
    from block_toys import block_toy
    from eagle_toys import save_target

    from specexec_cli.models.packing import read_packing
    from specexec_cli.models.skeleton import build_skeleton
    from specexec_cli.offload.block_heads import block_checkpoint, is_block_head
    from specexec_cli.offload.store import read_checkpoint
    from specexec_cli.planning.chosen_models import sized

    save_target(folder / "target")
    block_toy().save(folder / "head")
    target = sized(ModelEntry(name="t", repo=str(folder / "target")), offline=True)
    (folder / "hub").mkdir()

    def read() -> None:
        shutil.copy(folder / "head" / "config.json", folder / "hub")
        found = read_checkpoint(folder / "head")
        if is_block_head(found.config):  # else it is a damaged Qwen3
            sized(ModelEntry(name="h", repo=str(folder / "hub")), offline=True, target=target)
            found = block_checkpoint(found, target.config)
            build_skeleton(found, read_packing(found, lambda text: None))

    return at(folder / "head" / "config.json", read)


@kind
def torch_file(folder: Path) -> Sample:
    import torch

    from specexec_cli.offload.torch_files import read_torch_file

    path = folder / "pytorch_model.bin"
    torch.save({"first": torch.ones(3, 4), "second": torch.ones(7).half()}, path)
    return at(path, lambda: read_torch_file(path), mutated_torch_file)


@kind
def assistant_config(folder: Path) -> Sample:
    from assistant_toys import save_assistant, save_gemma

    from specexec_cli.models.packing import read_packing
    from specexec_cli.models.skeleton import build_skeleton
    from specexec_cli.offload.assistant import assistant_checkpoint, is_assistant
    from specexec_cli.offload.store import read_checkpoint
    from specexec_cli.planning.chosen_models import sized

    save_assistant(folder / "head", save_gemma(folder / "target"))
    target = sized(ModelEntry(name="t", repo=str(folder / "target")), offline=True)
    (folder / "hub").mkdir()

    def read() -> None:
        shutil.copy(folder / "head" / "config.json", folder / "hub")
        found = read_checkpoint(folder / "head")
        if is_assistant(found.config):  # else it is a damaged Gemma 4, of which nothing is told
            sized(ModelEntry(name="h", repo=str(folder / "hub")), offline=True, target=target)
            found = assistant_checkpoint(found, target.config)
            build_skeleton(found, read_packing(found, lambda text: None))

    return at(folder / "head" / "config.json", read)


@kind
def safetensors_header(folder: Path) -> Sample:
    from specexec_cli.offload.resident import read_tensors

    path = _llama(folder) / "model.safetensors"

    def read() -> None:
        from specexec_cli.offload.store import read_checkpoint

        found = read_checkpoint(folder)
        length = path.stat().st_size
        assert all(0 <= each.start <= each.stop <= length for each in found.values())
        stored = read_tensors(list(found.values())) if len(found) else {}
        assert all(stored[name].nbytes == each.n_bytes for name, each in found.items())
        _build(folder)

    return at(path, read, mutated_safetensors)


@kind
def safetensors_index(folder: Path) -> Sample:
    from checkpoints import byte_llama, save_checkpoint

    save_checkpoint(folder, byte_llama(num_hidden_layers=1), shard_bytes=40_000)

    def read() -> None:
        from specexec_cli.offload.store import read_checkpoint

        assert all(each.path.parent == folder for each in read_checkpoint(folder).values())
        _build(folder)

    return at(folder / "model.safetensors.index.json", read)


@kind
def tokenizer(folder: Path) -> Sample:
    _llama(folder)
    return at(folder / "tokenizer.json", lambda: _tokenize(folder))


@kind
def tokenizer_config(folder: Path) -> Sample:
    _llama(folder)
    return at(folder / "tokenizer_config.json", lambda: _tokenize(folder))


@kind
def tiktoken_model(folder: Path) -> Sample:
    path = _tiktoken(folder) / "tiktoken.model"
    return at(path, lambda: _encode(folder), whole)


@kind
def tiktoken_config(folder: Path) -> Sample:
    path = _tiktoken(folder) / "tokenizer_config.json"
    return at(path, lambda: _encode(folder))


def _tiktoken(folder: Path) -> Path:
    """Kimi's tokenizer files, of few tokens."""
    tokens = [*(bytes([each]) for each in range(256)), b"th", b"the", b" the"]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    names = ["[BOS]", "[EOS]", "<|im_end|>"]
    added = {str(len(tokens) + n): {"content": name, "special": True}
             for n, name in enumerate(names)}  # fmt: skip
    said = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added,
            "chat_template": "{{ messages }}"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def _encode(folder: Path) -> None:
    from specexec_cli.models.tokenizer import load_tokenizer
    from specexec_cli.session.encoding import PromptEncoder

    encoder = PromptEncoder(load_tokenizer(folder), "model")
    encoder.encode("the é[EOS]")
    encoder.encode_chat([{"role": "user", "content": "hi"}])


@kind
def generation_config(folder: Path) -> Sample:
    _llama(folder)
    path = folder / "generation_config.json"
    said = {"eos_token_id": [2, 1], "do_sample": True, "temperature": 0.6, "top_p": 0.95,
            "top_k": 20, "typical_p": 1.0}  # fmt: skip
    path.write_text(json.dumps(said))
    return at(path, lambda: _tokenize(folder))


def _tokenize(folder: Path) -> None:
    """What a session does with a tokenizer before the first pass."""
    from specexec_cli.models.checkpoint_info import eos_token_ids
    from specexec_cli.models.makers_sampling import makers_sampling
    from specexec_cli.models.skeleton import load_config
    from specexec_cli.models.tokenizer import check_same_tokenizer, load_tokenizer
    from specexec_cli.offload.store import read_checkpoint
    from specexec_cli.session.encoding import PromptEncoder

    found = load_tokenizer(folder)
    check_same_tokenizer(found, found, 300)
    checkpoint = read_checkpoint(folder)
    eos_token_ids(folder, load_config(checkpoint), found)
    makers_sampling(checkpoint).with_choice(SamplingChoice())
    encoder = PromptEncoder(found, "model")
    encoder.encode("def f(x): é")
    encoder.encode_chat([{"role": "user", "content": "hi"}])


@kind
def gguf(folder: Path) -> Sample:
    from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
    from gguf_files import write_gguf

    from specexec_cli.gguf.container import read_gguf
    from specexec_cli.models.gguf_tokenizer import load_gguf_tokenizer
    from specexec_cli.offload.gguf_checkpoint import read_gguf_checkpoint
    from specexec_cli.offload.resident import read_tensors

    path = folder / "tiny.gguf"
    model = save_checkpoint(folder / "plain", byte_llama(num_hidden_layers=1))
    save_byte_tokenizer(folder / "plain")
    write_gguf(model, path, tokenizer=folder / "plain")
    header_bytes = min(each.start for each in read_gguf(path).tensors.values())

    def read() -> None:
        found, length = read_gguf_checkpoint(path), path.stat().st_size
        assert all(0 <= each.start <= each.stop <= length for each in found.values())
        read_tensors(list(found.values()))
        cache = "specexec_cli.models.gguf_tokenizer.user_cache_path"
        with mock.patch(cache, return_value=folder):
            load_gguf_tokenizer(path).encode("x")
        _build(path)

    return at(path, read, lambda raw, rng: mutated(raw, rng.choice((600, header_bytes)), rng))


@kind
def names_of_models(folder: Path) -> Sample:
    """What transformers' models are called, kept so that it need not look into each one's files."""
    from specexec_cli.cli import lean_imports

    names = {"llama": {"LlamaConfig", "LlamaModel"}}
    listing = {frozenset(): names, frozenset({"torch"}): {"bert": {"BertModel"}}}
    models = folder / "models"
    models.mkdir()

    def read() -> None:
        with mock.patch.object(lean_imports, "user_cache_path", return_value=folder):
            found = lean_imports._kept_names(models, lambda: listing)
        assert {
            frozenset(needed): {module: set(of) for module, of in modules.items()}
            for needed, modules in found
        } == listing

    read()
    (kept,) = (folder / "imports").iterdir()
    return at(kept, read, whole)


# --- What comes over a network, and what other programs keep ---


@cache
def _hub() -> FakeHub:
    """One for all samples of this process, to whose end it runs."""
    hub = FakeHub(repos={REPO: {"config.json": b"{}", "model.safetensors": b"w"}})
    stack = ExitStack()
    stack.enter_context(running(hub))
    atexit.register(stack.close)
    return hub


def _answers(folder: Path, has: str, ask: Callable[[ModelEntry], object]) -> Sample:
    """One answer in JSON of a hub whose others are right.

    Args:
        has: what that answer has in it.
        ask: asks for it.
    """

    inside, found, hub = folder / "cache", [""], _hub()

    def read(data: bytes) -> None:
        def told(text: str) -> str:
            if has not in text:
                return text
            found[0] = found[0] or text
            return data.decode("utf-8", "replace") if data else text

        with (
            mock.patch.object(hub, "told", told),
            pytest.MonkeyPatch.context() as patch,
        ):
            asked_instead(hub, inside, patch)
            try:
                ask(ModelEntry(name=REPO, repo=REPO))
            finally:
                files = [path for path in folder.rglob("*") if path != inside]
                assert all(inside in path.parents for path in files), files
                shutil.rmtree(inside, ignore_errors=True)

    read(b"")
    return Sample(found[0].encode(), read, mutated_json)


@kind
def hub_model(folder: Path) -> Sample:
    from specexec_cli.catalog.downloads import survey

    return _answers(folder, '"siblings"', survey)


@kind
def hub_tree(folder: Path) -> Sample:
    from specexec_cli.catalog.hub import fetch

    return _answers(folder, '[{"type"', fetch)


@kind
def ollama_manifest(folder: Path) -> Sample:
    from specexec_cli.catalog.found_files import found_files

    path = folder / "manifests" / "registry.ollama.ai" / "library" / "m" / "7b"
    path.parent.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "sha256-ab").write_bytes(b"GGUF")
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}]
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))

    def read() -> None:
        with mock.patch.dict("os.environ", {"OLLAMA_MODELS": str(folder)}):
            found_files()

    return at(path, read)
