"""A mixture larger than its memory runs under a cgroup limit, and is not killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import BYTE_VOCAB, architecture, save_byte_tokenizer, save_checkpoint, save_pair

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from memory_cap import CGROUPS, Cgroup

PROMPT = "def f(x):"
SHARE_BYTES = 130_000_000  # for a target of 205 MB; 84 MB of it are activations

# The limit is set after all that costs memory whatever the target: imports, threads, a draft model.
PROGRAM = f"""
import json, re, sys
from pathlib import Path
from specexec_cli.config import GenerationConfig, TreeConfig
from specexec_cli.session import Session

def generate(target, draft):
    with Session.open(model=target, draft=draft, dtype="float32", offload="auto") as session:
        steps = session.generate({PROMPT!r}, tree=TreeConfig(budget=8, max_depth=4),
                                 generation=GenerationConfig(max_tokens=12))
        tokens = [token for step in steps for token in step.tokens]
        store = session.target.model.experts
        slots = store and [store.slots, store.slot_bytes, len(store.files)]
        return tokens, slots, session.decision.plan.peak_ram_bytes

target, small, draft, folder, share = sys.argv[1:]
generate(small, draft)
if folder != "none":
    stat = (Path(folder) / "memory.stat").read_text()
    used = int(re.search(r"^(?:total_rss|anon) (\\d+)$", stat, re.MULTILINE)[1])
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (Path(folder) / name).exists():
            (Path(folder) / name).write_text(str(used + int(share)))
tokens, slots, planned = generate(target, draft)
print(json.dumps({{"tokens": tokens, "slots": slots, "planned": planned}}))
"""


def run(
    target: Path, small: Path, draft: Path, group: Cgroup | None, share: int
) -> dict[str, object]:
    folder = group.folder if group is not None else "none"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, small, draft, folder, str(share)],
        capture_output=True, text=True, check=False,
        preexec_fn=group.enter if group is not None else None,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr[-2000:]}"
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@pytest.mark.skipif(not CGROUPS.is_dir(), reason="no cgroups here")
def test_a_mixture_larger_than_its_memory_is_not_killed(tmp_path: Path) -> None:
    group = Cgroup.create(4_000_000_000)
    if group is None:
        pytest.skip("this user may not make a memory cgroup")
    config = architecture("qwen3-moe")
    config.vocab_size, config.hidden_size, config.moe_intermediate_size = BYTE_VOCAB, 512, 512
    config.num_experts, config.num_hidden_layers = 32, 4
    config.max_position_embeddings = 64  # activations of a prompt take little
    target = tmp_path / "target"
    save_checkpoint(target, config, dtype=torch.bfloat16, std=0.05)
    save_byte_tokenizer(target)
    n_bytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    assert n_bytes > 200_000_000
    small, draft = save_pair(tmp_path / "small")
    try:
        found = run(target, small, draft, group, SHARE_BYTES)
    finally:
        group.remove()
    assert isinstance(found["slots"], list)
    slots, slot_bytes, experts = found["slots"]
    assert slots < experts / 2, "the limit does bite"
    assert slots * slot_bytes < n_bytes // 4
    assert isinstance(found["planned"], int)
    assert found["planned"] <= SHARE_BYTES
    assert found["tokens"] == run(target, small, draft, None, 0)["tokens"]
