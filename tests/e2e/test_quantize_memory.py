"""A model that is larger than the memory it is given is quantized, as it is with any memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import byte_llama, save_checkpoint
from safetensors.torch import load_file

from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.offload.store import read_checkpoint

# So that the limit counts what the program holds: each arena of glibc's malloc reserves 64 MB, and
# its heap, which large tensors come from once some have been freed, has gaps.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}

# The limit is set after all that costs memory whatever the model: imports, threads, kernels.
PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np
from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.offload.store import read_checkpoint

def quantize(source, out):
    plan = plan_quantization(read_checkpoint(Path(source)), 4, 64)
    write_quantized(plan, Path(out), pieces=[list(range(4, 36)), list(range(40, 72))])

large, small, out, share, whole = sys.argv[1:]
quantize(small, out + "-small")
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = used + int(share)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    np.empty(int(whole), np.uint8)
except MemoryError:
    print("it bites")
quantize(large, out)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="no limit on the address space to be set here"
)
def test_half_of_the_model_s_size_is_enough(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("the address space is already limited")
    # layers so small that what does not grow with their number is far below half of them all
    sizes = {"hidden_size": 384, "intermediate_size": 384, "num_attention_heads": 6,
             "num_key_value_heads": 6}  # fmt: skip
    for name, layers in (("large", 48), ("small", 1)):
        config = byte_llama(**sizes, num_hidden_layers=layers)
        save_checkpoint(tmp_path / name, config, std=0.03, dtype=torch.bfloat16)
    large = tmp_path / "large"
    whole = read_checkpoint(large).total_bytes
    assert whole > 80_000_000
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, large, tmp_path / "small", tmp_path / "out",
         str(whole // 2), str(whole)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **MALLOC},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "it bites\n"), ran.stderr[-2000:]
    plan = plan_quantization(read_checkpoint(large), 4, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as there: sums of calibration's moments follow how they are shared
    try:
        write_quantized(plan, tmp_path / "roomy", pieces=[list(range(4, 36)), list(range(40, 72))])
    finally:
        torch.set_num_threads(threads)
    found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "roomy")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
