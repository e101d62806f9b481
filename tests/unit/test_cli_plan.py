import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from cli_runner import run_cli
from computer import Computer
from typer.testing import CliRunner

from specexec_cli.cli.machine import parse_bytes
from specexec_cli.cli.mends import with_mend
from specexec_cli.cli.plan import plan
from specexec_cli.device import GpuInfo
from specexec_cli.errors import ConfigError, OutOfMemoryError, UnknownModelError
from specexec_cli.planning import machine as site_module
from specexec_cli.planning.machine_rates import LayerCost, new_rates, rates_file, save_rates
from specexec_cli.planning.speed import figure

GB = 10**9
APP = typer.Typer()
APP.command()(plan)


@pytest.fixture(autouse=True)
def bare_machine(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No GPU, no measured rates, an empty hub cache, bfloat16; returns where rates are kept."""
    computer.has_cpu("A CPU", "avx2", "avx512f", "avx512bw", "avx512_bf16")
    monkeypatch.setenv("COLUMNS", "80")
    return rates_file()


def run(*args: str) -> str:
    result = CliRunner().invoke(APP, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def tables(*args: str) -> str:
    return run(*args, "--all")


def as_json(*args: str) -> dict:
    return json.loads(run(*args, "--json"))


def test_a_70b_on_a_small_gpu_before_any_download() -> None:
    found = as_json(
        "llama2-70b-chat-gptq", "--vram", "24GB", "--ram", "40GB", "--link", "25GB/s",
        "--ssd", "3GB/s", "--context", "2048", "--budget", "128",
    )  # fmt: skip
    assert found["schema"] == 1
    assert found["target"]["source"] == "models.toml"
    assert found["target"]["bytes"] == pytest.approx(35.3e9, rel=0.01)
    assert found["peak_vram_bytes"] <= 24 * GB
    assert found["peak_ram_bytes"] <= 36 * GB, "4 GB stay unpinned"
    assert len(found["tiers"]) == found["target"]["layers"] == 80
    assert found["link_s"] == pytest.approx(found["link_bytes"] / 25e9)
    assert found["bottleneck"] == "link"
    assert found["machine"]["ssd"] == {"value": 3e9, "source": "given"}
    assert found["work"]["item_bytes"] == 2


def test_the_table_tells_layers_time_and_speed() -> None:
    text = tables(
        "llama2-7b", "--method", "autoregressive", "--ram", "6GB", "--ssd", "3GB/s",
        "--context", "512",
    )  # fmt: skip
    assert "13.5 GB  32 of 405 MB" in text
    assert "one row a pass" in text
    assert "bound by the SSD" in text
    assert "of RAM nothing would be on the SSD" in text
    assert "Not measured yet: memory, arithmetic. `specexec doctor` does." in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_target_server_of_dsi_has_its_part_of_what_all_workers_take() -> None:
    """Two servers and a drafter on two GPUs, the second of which has two contexts."""
    draft = ("--draft", "qwen2.5-0.5b-instruct-gptq")
    pair = ("qwen2.5-7b-instruct", *draft, "--ram", "64GB", "--vram", "24GB")
    alone, found = as_json(*pair), as_json(*pair, "--method", "dsi", "--devices", "cuda:0,cuda:1")
    assert found["vram"]["CUDA context"] == 2 * alone["vram"]["CUDA context"]
    assert found["ram"]["program"] == 1.5 * alone["ram"]["program"]
    assert found["machine"]["ram"] == {"value": 32 * GB, "source": "given"}
    assert found["machine"]["vram"] == {"value": 24 * GB, "source": "given"}
    assert "of each of 2 target servers of DSI" in found["dsi"]
    assert "CUDA contexts of all 3 workers" in found["dsi"]
    three = as_json(*pair, "--method", "dsi", "--sp", "3")
    assert three["vram"]["CUDA context"] == 2 * alone["vram"]["CUDA context"]
    assert three["machine"]["vram"]["value"] == 12 * GB
    with pytest.raises(ConfigError, match="--sp and --devices are for --method dsi alone"):
        run(*pair, "--sp", "3")


def test_a_mixture_that_is_all_in_memory_says_so() -> None:
    args = ("qwen3-30b-a3b-gptq", "--vram", "8GB", "--ram", "32GB")
    text = " ".join(tables(*args).split())
    assert "Experts: 15.2 GB, all of them in memory;" in text
    assert "of the experts in memory" not in text, "more RAM would bring nothing"


def test_a_mixture_tells_what_its_cache_brings() -> None:
    args = ("qwen3-30b-a3b", "--method", "autoregressive", "--ram", "16GB")
    text = " ".join(tables(*args).split())
    assert "a pass of 1 row 384" in text
    assert "a pass of 16 rows" in text
    assert "of which" in text
    assert "in memory; dense parts 1.8 GB" in text
    assert "With 32.0 GB of RAM:" in text
    assert all(len(line) <= 80 for line in tables(*args).splitlines())
    experts = as_json(*args)["experts"]
    assert experts["cache_share"] == pytest.approx(experts["cache_bytes"] / experts["expert_bytes"])
    assert [each["rows"] for each in experts["by_rows"]] == [1, 4, 16]
    now, more = experts["by_rows"][0], experts["more_ram"]
    assert [each["ram_bytes"] for each in more] == [24 * GB, 32 * GB]
    assert now["tokens_per_s"][0] < more[0]["tokens_per_s"][0] < more[1]["tokens_per_s"][0]
    assert as_json("llama2-7b", "--method", "autoregressive", "--ram", "6GB")["experts"] is None


def test_measured_rates_are_used_and_the_knee_is_shown(bare_machine: Path) -> None:
    save_rates(
        replace(
            new_rates(), ssd_bytes_per_s=4e9, memory_bytes_per_s=12e9,
            flops=dict.fromkeys(["float32", "bfloat16"], ((1, 2e10), (128, 5e11))),
        ),
        bare_machine,
    )  # fmt: skip
    args = ("llama2-7b-chat", "--ram", "10GB", "--budget", "64", "--context", "256")
    found = as_json(*args)
    assert found["machine"]["ssd"] == {"value": 4e9, "source": "measured"}
    assert found["compute_s"] > 0
    assert 50 < found["knee_rows"] < 200
    text = tables(*args)
    assert f"A pass of up to {found['knee_rows']} rows takes no longer than one of 1 row" in text
    assert "knee" not in text
    assert "Not measured" not in text


PLANS = [
    ("llama2-7b-chat", "--ram", "10GB"),
    ("llama2-70b-chat-gptq", "--vram", "24GB", "--ram", "64GB"),
    (
        "llama2-70b-chat-gptq-7b-gptq",
        "--vram",
        "12GB",
        "--ram",
        "30GB",
        "--budget",
        "300",
    ),
    ("qwen2.5-14b-instruct-gptq", "--vram", "24GB", "--ram", "32GB"),
    ("qwen3-30b-a3b", "--ram", "24GB"),
    ("mixtral-8x7b-instruct-gptq", "--vram", "16GB", "--ram", "32GB"),
    ("gpt-oss-120b-20b", "--vram", "24GB", "--ram", "64GB"),
    ("qwen3-8b", "--draft", "self", "--vram", "12GB", "--ram", "64GB"),
    ("llama2-7b", "--method", "autoregressive", "--ram", "6GB"),
]
KNOWN = dict.fromkeys(["float32", "bfloat16"], ((1, 2e10), (128, 5e11)))
COST = LayerCost(layer_s=1e-3, row_s=1e-4, slot_s=2e-7)


def interval(number: str) -> tuple[float, float]:
    """What was rounded to a number as printed, with its unit if it has one."""
    value, _, unit = number.partition(" ")
    half = 0.5 * 10.0 ** -len(value.partition(".")[2])
    scale = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    return (float(value) - half) * scale, (float(value) + half) * scale


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("args", PLANS, ids=[" ".join(args[1::2]) for args in PLANS])
def test_every_line_of_a_plan_multiplies(
    args: tuple[str, ...], measured: bool, bare_machine: Path
) -> None:
    """Tokens a pass over the seconds of pass and drafting are tokens per second, of one tree."""
    if measured:
        rates = replace(new_rates(), flops=KNOWN, layers=dict.fromkeys(KNOWN, COST))
        save_rates(rates, bare_machine)
    found, text = as_json(*args), tables(*args)
    told = found["prediction"]
    for name, pace in told["paces"].items():
        seconds = pace["pass_s"] + pace["draft_s"]
        assert told[name] == pytest.approx(pace["tokens_per_pass"] / seconds)
    assert found["rows"] == told["nodes"] + 1
    assert found["pass_s"] == told["pass_s"] == told["paces"]["typical"]["pass_s"]
    computing = max(found["memory_s"], found["compute_s"], found["host_s"])
    computing += found["unpack_s"] + found["layers_s"] + found["kv_s"]
    computing = max(computing, found["starting_s"]) + found["waits_s"]
    rest_s = max(found["layers_s"], found["starting_s"]) + found["waits_s"]
    links_s = max(found["ssd_s"], found["link_s"]) + found["links_wait"] * rest_s
    assert found["pass_s"] == max(links_s, computing)
    assert found["compute_s"] > 0
    if "--vram" not in args:
        source = "measured" if measured else "assumed"
        assert re.search(rf"^ *products .* {source} *$", text, re.M)
    for link in ("ssd", "link", "memory"):
        seconds = found[f"{link}_bytes"] / found["machine"][link]["value"]
        assert found[f"{link}_s"] == pytest.approx(seconds)

    time = r"(\d[\d.]* (?:s|ms|us))"
    rows = re.findall(
        rf"^(with drafting|  from|  to|without) +([\d.]+) +([\d.]+) +{time}(?: +{time})?",
        text,
        re.M,
    )
    drafted = told["tokens_per_pass"] is not None
    names = ["with drafting", "  from", "  to", "without"] if drafted else ["without"]
    assert [row[0] for row in rows] == names
    for _, tokens_per_s, tokens, pass_s, draft_s in rows:
        low, high = interval(tokens)
        least, most = (
            sum(ends) for ends in zip(interval(pass_s), interval(draft_s or "0 us"), strict=True)
        )
        printed = interval(tokens_per_s)
        assert low / most <= printed[1], (tokens_per_s, tokens, pass_s, draft_s)
        assert printed[0] <= high / least, (tokens_per_s, tokens, pass_s, draft_s)
    flat = " ".join(text.split())
    (one_pass,) = re.findall(rf"together {time} the slowest", flat)
    counted = f"{found['rows']} row" + "s" * (found["rows"] > 1)
    assert f"a pass of {counted} " in flat
    assert f"A pass of {counted} takes about {one_pass}, bound by" in flat
    assert one_pass == rows[0][3]
    if drafted:
        nodes = f"{told['nodes']} node" + "s" * (told["nodes"] > 1)
        assert f"Growing a tree of {nodes} takes about {rows[0][4]}," in flat


@pytest.mark.parametrize("args", PLANS, ids=[" ".join(args[1::2]) for args in PLANS])
def test_a_plan_is_a_screen_that_begins_with_the_verdict(args: tuple[str, ...]) -> None:
    lines, found = run(*args).splitlines(), as_json(*args)
    assert len(lines) <= 23, "24 with the prompt"
    assert all(len(line) <= 80 for line in lines)
    flat, told = " ".join(" ".join(lines).split()), found["verdict"]
    speed = figure(found["prediction"]["typical"])
    assert flat.startswith(f"{args[0]} {told['verdict']}: about {speed} tok/s (")
    assert "GB to fetch" in flat.partition(";")[2]
    assert f"; llama.cpp about {figure(told['llama_cpp_tokens_per_s'])} tok/s. Memory" in flat
    assert "--all adds the tables" in lines[-1]


def test_packed_weights_are_planned_with_their_own_rates() -> None:
    settings = {
        name: site_module.Setting(0 if name == "vram" else 1e9, "given")
        for name in ("ram", "vram", "ssd", "link", "memory")
    }
    rates = {name: ((1, rate),) for name, rate in (("float32", 1e9), ("float32, 4 bits", 2e9))}
    site = site_module.Site(device="cpu", settings=settings, flops=rates)
    assert site.machine("float32").flops == ((1, 1e9),)
    assert site.machine("float32", packed_bits=4).flops == ((1, 2e9),)
    assert site.machine("float32", packed_bits=8).flops == ((1, 1e9),)  # the nearest that is known
    assert site.machine("bfloat16", packed_bits=4).flops == ()


CARD = GpuInfo(0, "Card", 24 << 30, 23 << 30, 4, 16, "1")


def test_the_gpu_here_is_planned_for(computer: Computer) -> None:
    computer.has_cards(CARD)
    found = as_json(
        "llama2-70b-chat-gptq", "--ram", "64GB", "--context", "2048", "--budget", "1024"
    )
    assert found["machine"]["vram"] == {"value": 23 << 30, "source": "free here"}
    assert found["machine"]["link"]["source"] == "PCIe 4 x16"
    assert found["machine"]["link"]["value"] == pytest.approx(25.8e9, rel=0.01)
    assert as_json("demo", "--vram", "0")["peak_vram_bytes"] == 0


def test_a_gpu_without_triton_unpacks_before_every_product(
    computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 70B in 4 bits reads and writes 8 TB a pass: what is recommended has to know."""
    computer.has_cards(CARD)
    asked = ("llama2-70b-chat-gptq", "--ram", "64GB")
    with monkeypatch.context() as nothing_missing:
        nothing_missing.setattr(site_module, "triton_lack", lambda: None)
        fast = as_json(*asked)
    monkeypatch.setitem(sys.modules, "triton", None)
    slow, text = as_json(*asked), " ".join(tables(*asked).split())
    assert fast["triton_obstacle"] is None
    assert fast["unpack_s"] == 0
    assert slow["triton_obstacle"] == "it is not installed"
    assert slow["bottleneck"] == "unpack"
    rate = slow["machine"]["memory"]["value"]
    assert slow["unpack_s"] == pytest.approx(68.5e9 * 120 / rate, rel=0.01)
    assert slow["prediction"]["typical"] < fast["prediction"]["typical"] / 3
    assert (
        "Triton is missing: it is not installed. PyTorch unpacks packed weights before every "
        f"product, {slow['unpack_s']:.2f} s of a pass; mend: pip install triton."
    ) in text
    given = as_json(*asked, "--vram", "23GB")
    assert given["triton_obstacle"] is None, "of a described machine nothing is missing"
    assert as_json("llama2-7b-chat", "--ram", "64GB")["unpack_s"] == 0, "nothing is packed"


def test_a_local_folder_is_sized_by_its_files(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "vocab_size": 10,
        "num_hidden_layers": 1, "num_attention_heads": 2,
    }))  # fmt: skip
    save_file(
        {"model.layers.0.x": torch.zeros(100), "lm_head.weight": torch.zeros(7)},
        folder / "model.safetensors",
    )
    found = as_json(str(folder), "--method", "autoregressive")
    assert found["target"]["bytes"] == 428
    assert found["target"]["source"] == "its files"
    assert found["draft"] is None


def test_a_hub_id_is_sized_by_its_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "vocab_size": 10,
        "num_hidden_layers": 3, "num_attention_heads": 2, "torch_dtype": "float32",
    }))  # fmt: skip
    asked = []

    def download(repo: str, name: str, **options: object) -> str:
        asked.append((repo, name))
        return str(config)

    listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors")])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: listing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = as_json("org/name", "--method", "autoregressive")
    assert found["target"]["source"] == "config.json"
    assert found["target"]["layers"] == 3
    assert asked == [("org/name", "config.json")]


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    with pytest.raises(UnknownModelError, match=r"org/name is not .* in the cache"):
        run("org/name", "--method", "autoregressive", "--offline")


@pytest.mark.parametrize(
    ("target", "memory", "offload", "reason"),
    [
        ("llama2-7b-chat", ("--vram", "8GB"), "auto", "the target is no mixture of experts"),
        ("qwen3-30b-a3b", ("--vram", "0GB"), "auto", "no GPU computes here, so the CPU has all"),
        ("qwen3-30b-a3b", ("--vram", "8GB"), "ssd", "--offload ssd moves whole layers"),
        ("qwen3-30b-a3b", ("--vram", "8GB"), "ram", "--offload ram moves whole layers"),
        ("qwen3-30b-a3b", ("--vram", "80GB"), "none", "--offload none moves whole layers"),
    ],
)
@pytest.mark.parametrize("place", ["gpu", "cpu"])
def test_a_place_for_experts_that_no_plan_would_heed_is_refused(
    place: str, target: str, memory: tuple[str, str], offload: str, reason: str
) -> None:
    asked = ("plan", target, "--method", "autoregressive", "--ram", "128GB", *memory,
             "--offload", offload)  # fmt: skip
    ran = run_cli(*asked, "--experts", place)
    assert ran.code == 2
    assert ran.error.startswith(f"--experts {place}: {reason}")
    assert ran.error.endswith("Leave it at --experts auto")
    assert run_cli(*asked).code == 0


@pytest.mark.parametrize(
    "asked",
    [("--vram", "0GB", "--offload", "ssd"), ("--vram", "0GB"), ("--vram", "12GB"),
     ("--vram", "12GB", "--experts", "cpu"), ("--vram", "12GB", "--experts", "gpu")],
)  # fmt: skip
def test_what_more_ram_brings_is_what_a_plan_with_it_says(asked: tuple[str, ...]) -> None:
    def experts(ram: str) -> dict[str, Any]:
        found = as_json("qwen3-30b-a3b", "--method", "autoregressive", "--ram", ram,
                        *asked)["experts"]  # fmt: skip
        assert isinstance(found, dict)
        return found

    here, richer = experts("20GB"), experts("30GB")
    more = here["more_ram"][0]
    assert more["ram_bytes"] == 30 * GB
    assert more["cache_share"] == pytest.approx(richer["cache_share"])
    assert more["tokens_per_s"] == pytest.approx(richer["by_rows"][0]["tokens_per_s"])


def test_what_does_not_fit_names_the_mend() -> None:
    with pytest.raises(OutOfMemoryError, match="GB of VRAM ") as error:
        run("llama2-70b-chat", "--vram", "6GB", "--ram", "64GB")
    said = with_mend(error.value)
    assert re.search(r"It fits with --budget \d+ --draft llama-160m and \d+ tokens of", said)
    with pytest.raises(UnknownModelError, match="Did you mean 'llama2-7b-chat'"):
        run("llama2-7b-caht")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * GB), ("1.5gb", 3 * GB // 2), ("64 GiB", 64 << 30), ("512M", 512 * 10**6),
     ("0", 0), ("24", 24 * GB), ("1.5", 3 * GB // 2), ("7B", 7), ("2TB", 2000 * GB)],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--ram") == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "24 bananas", "1e9", "24GB/s"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ram .* is not a size: write it as 24GB"):
        parse_bytes(text, "--ram")


@pytest.mark.parametrize("text", ["0GB/s", "fast", "-3GB/s"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ssd .* is not a rate above 0: write it as 3GB/s"):
        run("demo", "--ssd", text)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, typer; from specexec_cli.cli.plan import plan\n"
        "app = typer.Typer(); app.command()(plan)\n"
        "app(['llama2-70b-chat-gptq', '--ram', '64GB'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)


def test_a_long_context_of_a_70b_fits_12_gb_of_vram() -> None:
    told = as_json(
        "llama3.1-70b-instruct-gptq", "--draft", "llama3.2-1b-instruct-awq", "--gpu", "RTX 3060",
        "--vram", "12GB", "--ram", "64GB", "--link", "25GB/s", "--ssd", "3GB/s",
        "--context", "32768", "--offline",
    )  # fmt: skip
    assert sum(told["vram"].values()) <= 12e9
    # 80 layers of 8 heads of 128 numbers in 2 bytes, keys and values, of more than the context
    row = 80 * 8 * 128 * 2 * 2
    held = told["ram"]["keys and values"] + told["vram"]["target's KV cache"]
    assert 32768 * row <= held < 1.1 * 32768 * row
    assert told["ram"]["keys and values"] > 0.8 * held
