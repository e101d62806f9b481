"""Where a session's layers go on a GPU, and how fast what streams can come."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import byte_llama, save_checkpoint

from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload import placement
from specexec_cli.offload.placement import place_on_gpu
from specexec_cli.offload.plan import HUGE_PAGE_BYTES, Work
from specexec_cli.offload.store import read_checkpoint

LINK, SSD = 20e9, 2e9


def test_the_rate_that_streamed_bytes_can_come_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SSD's where all comes from there, more where RAM adds its part, the link's at most."""
    save_checkpoint(tmp_path, byte_llama(num_hidden_layers=8))
    target, work = read_checkpoint(tmp_path), Work(context_tokens=100, budget=8)
    monkeypatch.setattr(placement, "_ssd_rate", lambda files, n_bytes: SSD)
    rates: dict[str, set[float | None]] = {}
    for ram_bytes in (6 << 20, 12 << 20, 40 << 20):
        for vram_bytes in range(700_000_000, 740_000_000, HUGE_PAGE_BYTES):
            try:
                found = place_on_gpu(
                    "auto", target, None, work, ram_bytes, vram_bytes, lambda: LINK
                )
            except OutOfMemoryError:
                continue
            assert found.tiers is not None
            ssd, ram = found.tiers.count("ssd"), found.tiers.count("ram")
            if ssd or ram:
                assert found.ssd_share == ssd / (ssd + ram)
            rates.setdefault(found.label, set()).add(found.link_bytes_per_s)
    assert rates["resident"] == {None}
    assert rates["ram+resident"] == {LINK}
    assert rates["resident+ssd"] == {SSD}
    for rate in rates["ram+resident+ssd"]:
        assert rate is not None
        assert SSD < rate < LINK
