"""The speed that llama.cpp would reach with the same weights, for comparison beside a prediction.

    seconds = the sum of bytes in VRAM, in RAM and on the SSD, each over the share of its rate
              that products reach
            >= the products of one row, where a CPU computes alone

The bytes are those of the weights that one token is multiplied by. Products on a CPU are taken
to be as fast as those here, which were measured beside llama.cpp's (docs/measured.md). The split is
the best that llama.cpp's options allow: the GPU holds what every token needs, then experts or
layers as far as they fit, and the CPU computes the rest. tests/unit/test_llama_cpp.py compares the
formula with published figures, and with measured ones.
"""

from __future__ import annotations

from specexec_cli.device import usable_cores
from specexec_cli.planning.gpu_rates import BANDWIDTH_SHARE
from specexec_cli.planning.machine import ASSUMED, Machine
from specexec_cli.planning.measured_rates import product_seconds, steady_flops
from specexec_cli.planning.sizes import ModelBytes

_SHARE = 0.8  # of a memory's rate that plain decoding reaches: 35 to 45 of 51 tok/s on an RTX 4090
_GPU_SHARE = _SHARE / BANDWIDTH_SHARE  # of a GPU's rate in a plan, which is what products reach
_BUFFER_BYTES = 400_000_000  # of a GPU, for the activations of a batch of 512 rows
_CACHE_ITEM_BYTES = 2  # keys and values are float16
# Two channels of DDR4-3200. Where nothing was measured, ASSUMED is slower, so that specexec is not
# promised to be fast; for another program the mistake should be on the other side.
_USUAL_RAM_BYTES_PER_S = 40e9
_CORE_FLOPS = 16e9  # of one row's products, of one core of a Zen 5


def llama_cpp_tokens_per_s(target: ModelBytes, machine: Machine, context_tokens: int) -> float:
    """Tokens per second of llama.cpp without a draft model, at its best split of the weights.

    Args:
        context_tokens: prompt and text; their keys and values lie where most weights are computed.
    """
    host_rate = machine.host_bytes_per_s if machine.vram_bytes else machine.memory_bytes_per_s
    if host_rate == ASSUMED["CPU memory"]:
        host_rate = _USUAL_RAM_BYTES_PER_S
    cache = target.kv_elements * context_tokens * _CACHE_ITEM_BYTES
    vram, ram = 0, machine.usable(machine.ram_bytes) - machine.base_bytes
    if machine.vram_bytes:
        taken = machine.context_bytes + _BUFFER_BYTES + cache
        vram = max(0, machine.usable(machine.vram_bytes) - taken)
    else:
        ram -= cache
    ram, seconds = max(0, ram), 0.0
    for stored, read in _parts(target):
        in_vram = min(stored, vram)
        in_ram = min(stored - in_vram, ram)
        on_ssd = stored - in_vram - in_ram
        vram, ram = vram - in_vram, ram - in_ram
        seconds += read * (
            in_vram / (_GPU_SHARE * machine.memory_bytes_per_s)
            + in_ram / (_SHARE * host_rate)
            + on_ssd / (_SHARE * machine.ssd_bytes_per_s)
        )
    return 1.0 / max(seconds, _product_seconds(target, machine))


def _product_seconds(target: ModelBytes, machine: Machine) -> float:
    """Seconds of one row's products, where a CPU computes alone."""
    if machine.vram_bytes:
        return 0.0
    flops = machine.flops or steady_flops(_CORE_FLOPS * usable_cores())
    return product_seconds(target.active_params + target.vocab * target.hidden, 1, flops)


def _parts(target: ModelBytes) -> list[tuple[int, float]]:
    """Stored bytes and the share of them that a token reads, the most read first."""
    experts = target.experts
    if experts is None:
        # experts that move with their layer are read one by one all the same
        read = target.active_params / target.layer_params
        return [(target.read_bytes - sum(target.layers), 1.0), (sum(target.layers), read)]
    return [
        (target.dense.read_bytes, 1.0),
        (sum(experts.layers), experts.chosen / experts.count),
    ]
