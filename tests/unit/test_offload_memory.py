import gc
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload import memory
from specexec_cli.offload.memory import HugeBuffer

MIB = 1 << 20


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_aligned_zeroed_and_writable() -> None:
    buffer = HugeBuffer(3 * MIB + 5, "a test", "Do not")
    assert len(buffer.view) == 3 * MIB + 5
    assert buffer.address % HUGE_PAGE_BYTES == 0
    tensor = torch.frombuffer(buffer.view, dtype=torch.uint8)
    assert tensor.data_ptr() == buffer.address
    assert not tensor.any()
    tensor.fill_(7)
    assert bytes(buffer.view[-3:]) == b"\7\7\7"
    del tensor
    buffer.close()


def test_close_unmaps_at_once_and_twice_is_fine() -> None:
    before = address_space_bytes()
    buffer = HugeBuffer(64 * MIB, "a test", "Do not")
    assert address_space_bytes() >= before + 64 * MIB
    buffer.close()
    assert address_space_bytes() < before + 32 * MIB
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.view


def test_views_outlive_close_and_the_last_one_unmaps() -> None:
    before = address_space_bytes()
    buffer = HugeBuffer(64 * MIB, "a test", "Do not")
    tensor = torch.frombuffer(buffer.view[MIB : 2 * MIB], dtype=torch.float32)
    tensor.fill_(1.0)
    buffer.close()
    assert tensor.sum().item() == MIB / 4  # still mapped
    del tensor
    gc.collect()
    assert address_space_bytes() < before + 32 * MIB


def test_huge_pages_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    buffer = HugeBuffer(8 * MIB, "a test", "Do not")
    fields = "Rss: 8192 kB\nAnonHugePages: {} kB\n"
    smaps = tmp_path / "smaps"
    monkeypatch.setattr(memory, "Path", lambda _: smaps)
    for huge_kb, expected in ((8192, True), (0, False)):
        smaps.write_text(
            f"1000-2000 rw-p 0 0:0 0\nRss: 4 kB\nAnonHugePages: 0 kB\n"
            f"{buffer.address:x}-{buffer.address + 8 * MIB:x} rw-p 0 0:0 0\n"
            + fields.format(huge_kb)
        )
        assert buffer.has_huge_pages() is expected
    smaps.unlink()
    assert buffer.has_huge_pages()  # a kernel that does not tell is not blamed
    buffer.close()


def test_a_refused_mapping_names_bytes_and_mend() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"the ring: .* are needed but .* are free. Use less"
    ):
        HugeBuffer(1 << 62, "the ring", "Use less")


def test_a_limit_on_the_address_space_is_a_clear_error() -> None:
    code = (
        "import resource; from specexec_cli.offload.memory import HugeBuffer\n"
        "from specexec_cli.errors import OutOfMemoryError\n"
        "from specexec_cli.device import free_ram_bytes\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "assert free_ram_bytes() < 1 << 30\n"
        "try: HugeBuffer(1 << 30, 'a slot', 'Lower it')\n"
        "except OutOfMemoryError as error: print(error)\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith("a slot: 1.1 GB of RAM are needed but ")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no transparent huge pages here")
def test_a_kernel_without_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # madvise answers EINVAL
    buffer = HugeBuffer(MIB, "a test", "Do not")
    buffer.view[0] = 1
    buffer.close()
