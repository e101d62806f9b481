import json
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer
from busy_machine import Fake
from computer import Computer
from typer.testing import CliRunner

from specexec_cli.cli import doctor_report
from specexec_cli.cli.doctor import doctor, named_findings
from specexec_cli.cli.doctor_report import Report, ask, slow_parts
from specexec_cli.device import CpuInfo, GpuInfo
from specexec_cli.errors import StreamError
from specexec_cli.offload import disk_probe
from specexec_cli.offload.disk_probe import SsdProbe
from specexec_cli.planning.machine_rates import GpuRates, LayerCost, Rates, load_rates, rates_file

GB = 10**9
CARD = GpuInfo(0, "Card", 24 * GB, 23 * GB, 4, 16, "570")
HEALTHY = Report(
    versions={"specexec": "0", "Python": "3", "torch": "2+cu130"},
    platform="Linux",
    cpu=CpuInfo("A CPU", 16, ("avx512_bf16",)),
    load=1.0,
    ram_bytes=64 * GB,
    physical_ram_bytes=64 * GB,
    free_ram_bytes=60 * GB,
    huge_pages="madvise",
    gpus=(CARD,),
    torch_sees_gpu=True,
    cache="/models",
    disk_free_bytes=500 * GB,
    direct_reads=True,
    disk_error="",
    hub="https://hub",
    hub_error="",
    rates=Rates(
        host="here", cpu="one", measured="2026-01-01", ssd_bytes_per_s=4e9, memory_bytes_per_s=2e10,
        link_bytes_per_s=2.5e10,
        flops={"float32": ((1, 8e9), (128, 2e11)), "bfloat16": ((1, 1.5e10), (128, 7e11))},
    ),
)  # fmt: skip


def test_nothing_is_slow_on_a_healthy_machine() -> None:
    assert slow_parts(HEALTHY) == []


SLOW_BF16 = {"float32": ((1, 8e9), (128, 2e11)), "bfloat16": ((1, 1e10), (128, 5e10))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_sees_gpu": False}, "(CUDA 13: R580; here: 570)"),
        ({"gpus": (replace(CARD, pcie_width=4),)}, "GPU 0 has 4 of 16 PCIe lanes"),
        ({"triton_obstacle": "too old"}, "PyTorch unpacks packed weights before every product"),
        ({"disturbed": {"the disk": "other programs moved 2.0 GB on the disk"}},
         "The machine is busy: other programs moved 2.0 GB on the disk while the disk was measured."
         " These figures are less than it can do and are not kept"),
        ({"ram_bytes": 4 * GB}, "may use 4.0 GB of the machine's 64.0 GB (a cgroup or ulimit)"),
        ({"huge_pages": "never"}, "Huge pages are off"),
        ({"rates": replace(HEALTHY.rates, ssd_bytes_per_s=5e8)}, "reads 500 MB/s, so a pass over a "
         "7B model takes 26 s: put the model cache on an NVMe disk"),
        ({"direct_reads": False}, "file system of /models refuses O_DIRECT"),
        ({"disk_error": "no space"}, "The disk could not be measured: no space."),
        ({"disk_free_bytes": GB}, "Only 1.0 GB are free where models are stored"),
        ({"hub_error": "timed out"}, "https://hub cannot be reached (timed out)"),
    ],
)  # fmt: skip
def test_what_is_slow_is_told_with_its_reason(change: dict, message: str) -> None:
    found = slow_parts(replace(HEALTHY, **change))
    found = [line for line in found if not line.startswith("Arithmetic of up to")]
    assert len(found) == 1
    assert message in found[0]


def test_what_triton_lacks_is_told_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        return slow_parts(replace(HEALTHY, triton_obstacle="Triton does not start"))[0]

    monkeypatch.setitem(sys.modules, "triton", json)  # any module that is there
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "Triton is missing: it needs a C compiler. " in told()
    assert told().endswith("; mend: apt install gcc.")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    assert told().endswith("; mend: apt install python3-dev.")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert told().endswith("; mend: pip install triton.")


def test_a_cpu_without_fast_bfloat16() -> None:
    cpu_only = replace(
        HEALTHY, gpus=(), torch_sees_gpu=False, rates=replace(HEALTHY.rates, flops=SLOW_BF16)
    )
    text = "\n".join(slow_parts(cpu_only))
    assert "There is no GPU" in text
    assert "bfloat16 arithmetic is slower than float32 (50 against 200 GFLOP/s)" in text
    assert "Arithmetic of up to 32 rows hides behind reading a 7B model" in text
    none = replace(cpu_only.rates, flops={"float32": ((1, 1e9), (128, 2e9))})
    assert "even with one row" in "\n".join(slow_parts(replace(cpu_only, rates=none)))


def test_every_fact_has_a_line() -> None:
    gpu = GpuRates(card="Card", memory_bytes_per_s=9e11, tensor_flops=1.5e14,
                   products=((4, ((1, 1e-12), (16, 1e-12))),))  # fmt: skip
    lines = dict(named_findings(replace(HEALTHY, rates=replace(HEALTHY.rates, gpu=gpu))))
    assert lines["GPU memory"] == "copies 900 GB/s, read and written"
    assert lines["4-bit weights"] == "TFLOP/s by rows: 2 (1), 32 (16)"
    assert lines["GPU starts"].startswith("microseconds: an operation 20.0, a kernel 25.0")
    assert "23.0 GB free of 24.0 GB, PCIe 4 x16, driver 570" in lines["GPU 0"]
    assert lines["RAM to GPU"] == "25.0 GB/s"
    assert lines["disk there"] == "reads 4.0 GB/s (O_DIRECT), 500 GB free"
    assert lines["hub"] == "https://hub, reachable"
    bare = replace(
        HEALTHY, gpus=(), rates=Rates(host="here", cpu="one", measured="today"), hub_error="no"
    )
    lines = dict(named_findings(bare))
    assert lines["GPU"] == "none"
    assert lines["disk there"] == "500 GB free"
    assert lines["hub"] == "https://hub: no"


COST = LayerCost(layer_s=1e-3, row_s=1e-4, slot_s=1e-7)


@pytest.fixture
def quick_machine(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real examination with measurements replaced; returns where rates are kept."""
    monkeypatch.setattr(doctor_report, "ask", lambda address: "no network")
    computer.reads_at(3e9, 0)
    computer.copies_at(lambda: 1e10)
    computer.computes_at(lambda: ((1, 1e9), (128, 1e11)), COST)
    return rates_file()


def run(*args: str) -> str:
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_is_one_object_and_rates_are_kept(quick_machine: Path) -> None:
    found = json.loads(run("--json"))
    assert found["schema"] == 1
    assert found["rates"]["ssd_bytes_per_s"] == 3e9
    assert found["cpu"]["cores"] >= 1
    assert found["versions"]["torch"]
    assert any("no network" in line for line in found["slow"])
    rates = load_rates(quick_machine)
    assert rates is not None
    assert rates.layers == {"float32": COST, "bfloat16": COST}
    assert rates.flops == dict.fromkeys(
        ("float32", "float32, 4 bits", "float32, 8 bits",
         "bfloat16", "bfloat16, 4 bits", "bfloat16, 8 bits", "8-bit rows, 4 bits",
         "8-bit rows, 8 bits"),
        ((1, 1000000000.0), (128, 100000000000.0)),
    )  # fmt: skip


def test_what_was_measured_on_a_busy_machine_is_shown_and_not_kept(
    quick_machine: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    quiet = load_rates(quick_machine)
    busy = Fake(others_cores=0.5)
    busy.install(monkeypatch)
    computer.copies_at(lambda: busy.passes(2.0) or 1e9)
    found = json.loads(run("--json"))
    assert found["disturbed"] == {"memory": "other programs used 25% of the CPU"}
    assert found["rates"]["memory_bytes_per_s"] == 1e9
    assert any("25% of the CPU while memory was measured" in line for line in found["slow"])
    computer.reads_at(4e9, 0)
    run()
    assert load_rates(quick_machine) == replace(quiet, ssd_bytes_per_s=4e9)


def test_text_fits_the_terminal(quick_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run()
    assert "What will be slow, and why" in text
    assert "3.0 GB/s (O_DIRECT)" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_disk_that_fails_is_a_finding(
    quick_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> SsdProbe:
        raise StreamError("cannot write to it")

    monkeypatch.setattr(disk_probe, "probe_folder", fail)
    quick_machine.parent.parent.mkdir()
    quick_machine.parent.write_text("in the way")  # the rates cannot be kept either
    found = json.loads(run("--json"))
    assert found["disk_error"] == "cannot write to it"
    assert any("cannot be kept" in line for line in found["slow"])


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, ""), (404, ""), (503, "it answered 503"), (403, "it answered 403")],
)
def test_the_hub_is_asked(hub: str, status: int, answer: str, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert ask(f"{hub}/{status}") == answer


def test_no_hub_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert ask("http://127.0.0.1:9") == "Connection refused"
