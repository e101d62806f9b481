"""A target four times larger than the memory it is given runs, and says the right tokens."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import byte_llama, save_byte_tokenizer, save_pair
from safetensors.torch import save_file

PROMPT = "def f(x):"

# The limit is set after all that costs memory whatever the target: imports, threads, a draft model.
PROGRAM = f"""
import json, resource, sys
from pathlib import Path
from specexec_cli.cli.mends import with_mend
from specexec_cli.config import GenerationConfig, TreeConfig
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.session import Session

def generate(target, draft, offload):
    with Session.open(model=target, draft=draft, dtype="float32", offload=offload) as session:
        steps = session.generate({PROMPT!r}, tree=TreeConfig(budget=8, max_depth=4),
                                 generation=GenerationConfig(max_tokens=4))
        return [token for step in steps for token in step.tokens], dict(session.settings)

target, small, draft, share = sys.argv[1:]
generate(small, draft, "ssd")
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = used + int(share)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
refused = {{}}
for offload in ("ram", "none"):
    try:
        generate(target, draft, offload)
    except OutOfMemoryError as error:
        refused[offload] = with_mend(error)
tokens, settings = generate(target, draft, "auto")
print(json.dumps({{"tokens": tokens, "offload": settings["offload"], "refused": refused}}))
"""


def write_target(folder: Path) -> int:
    """A Llama of equal random layers in bfloat16; returns its bytes."""
    config = byte_llama(
        hidden_size=640, intermediate_size=1728, num_hidden_layers=64, num_attention_heads=10,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    tensors = {}
    for name, parameter in skeleton.named_parameters():
        kind = name.split(".", 3)[-1] if ".layers." in name else name
        if kind not in made:
            noise = torch.randn(parameter.shape, generator=generator) * 0.03
            made[kind] = (noise + (1.0 if "norm" in kind else 0.0)).to(torch.bfloat16)
        tensors[name] = made[kind].clone()  # safetensors stores no memory twice
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_byte_tokenizer(folder)
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="no limit on the address space to be set here"
)
def test_a_target_four_times_larger_than_its_memory(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("the address space is already limited")
    n_bytes = write_target(tmp_path / "target")
    assert n_bytes > 500_000_000, "a quarter holds what cannot be streamed"
    small, draft = save_pair(tmp_path / "small")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "target", small, draft, str(n_bytes // 4)],
        capture_output=True, text=True, check=False,
        # one malloc arena: each reserves 64 MB of address space that it does not use
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads(ran.stdout)
    assert result["offload"] == "ssd"
    assert set(result["refused"]) == {"ram", "none"}, "the limit does bite"
    assert all("--offload auto" in told for told in result["refused"].values())
    own = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32
    )
    prompt = save_byte_tokenizer(tmp_path / "words").encode(PROMPT)
    expected = own.generate(
        torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
    )[0, len(prompt) :].tolist()  # fmt: skip
    assert result["tokens"] == expected
