"""GGUF files of other programs: found, named, and used where they lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import run_cli
from computer import Computer
from fake_hub import FakeHub, asked_instead, running
from huggingface_hub import constants

from specexec_cli.catalog.downloads import survey
from specexec_cli.catalog.found_files import found_files
from specexec_cli.catalog.gguf_choice import usual_file
from specexec_cli.catalog.registry import load_registry
from specexec_cli.errors import NotFetchedError, UnknownModelError
from specexec_cli.planning.chosen_models import sized

GGUF = b"GGUF" + bytes(60)
REPO = "bartowski/Tiny-GGUF"


@pytest.fixture
def places(tmp_path: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Homes of three programs, each with a model."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))
    write_ollama(tmp_path / "ollama", "registry.ollama.ai/library/llama3.2/3b", "sha256:ab12")
    write_ollama(tmp_path / "ollama", "registry.ollama.ai/someone/own/latest", "sha256:cd34")
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    for name in ("a-Q4_K_M.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf",
                 "mmproj-a.gguf", "c-00001-of-00002.gguf", "e-00004-of-00003.gguf"):  # fmt: skip
        (folder / name).write_bytes(GGUF)
    (folder / "d.gguf").write_bytes(b"not one")
    snapshot = computer.hub / "models--bartowski--Tiny-GGUF" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "Tiny-Q4_K_M.gguf").write_bytes(GGUF)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    return tmp_path


def write_ollama(folder: Path, name: str, digest: str) -> Path:
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = folder / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(GGUF)
    return manifest


def test_models_list_shows_them_and_names_that_run(places: Path) -> None:
    ran = run_cli("models", "list", "--json")
    assert ran.code == 0, ran.err
    found = {each["name"]: each for each in json.loads(ran.out)["found"]}
    llama_cpp = places / "llama.cpp"
    assert found.keys() == {
        "ollama:llama3.2:3b", "ollama:someone/own:latest", f"{REPO}:Tiny-Q4_K_M.gguf",
        str(llama_cpp / "a-Q4_K_M.gguf"), str(llama_cpp / "b-00001-of-00002.gguf"),
    }  # fmt: skip
    assert found[str(llama_cpp / "b-00001-of-00002.gguf")]["size_bytes"] == 2 * len(GGUF)
    listed = run_cli("models", "list").out
    assert all(name in listed for name in found)
    registry = load_registry()
    for name, each in found.items():
        entry = registry.resolve(name)
        if entry.folder is not None:
            assert str(entry.folder) == each["path"]


def test_models_of_lm_studio_and_of_the_hub_s_cache_are_found(
    tmp_path: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".lmstudio" / "models" / "org" / "Own-GGUF" / "own-Q4_K_M.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(GGUF)
    (file.parent / "mmproj-own.gguf").write_bytes(GGUF)
    kinds = {"org/whole": "qwen3", "org/sees": "clip", "Qwen/Qwen3-4B": "qwen3"}
    for repo, model_type in kinds.items():
        folder = computer.hub / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        (snapshot / "model.safetensors").write_bytes(bytes(100))
        (snapshot / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = {each.name: (each.program, each.size_bytes) for each in found_files()}
    assert found == {
        str(file): ("LM Studio", len(GGUF)), "org/whole": ("hub", 100),
        "Qwen/Qwen3-4B": ("hub", 100),
    }  # fmt: skip
    lines = run_cli("models", "list", "--vram", "8", "--ram", "64").out.splitlines()
    rows = lines[lines.index("") + 2 :]
    assert rows[0].startswith("qwen3-4b "), "by its name in models.toml, and once"
    assert rows[1].startswith(f"~/{file.relative_to(tmp_path)}")
    assert rows[3].startswith("org/whole ")
    assert rows[4].startswith("qwen3.8-27b-gptq "), "what would have to be fetched comes last"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": ["x"]}', "{" * 9])
def test_a_broken_config_in_the_hub_s_cache_is_passed_over(
    content: str, computer: Computer
) -> None:
    snapshot = computer.hub / "models--org--broken" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    (snapshot / "config.json").write_text(content)
    assert found_files() == []


def test_latest_is_the_tag_that_ollama_means(places: Path) -> None:
    blob = places / "ollama" / "blobs" / "sha256-cd34"
    assert load_registry().resolve("ollama:someone/own").folder == blob
    near = r"ollama has no model 'llama3\.2' here\. Did you mean 'ollama:llama3\.2:3b'\?"
    with pytest.raises(UnknownModelError, match=near):
        load_registry().resolve("ollama:llama3.2")
    with pytest.raises(UnknownModelError, match=r"no model 'qwq' here\. `specexec models list`"):
        load_registry().resolve("ollama:qwq")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"layers": 3}', '{"layers": [{}]}', "{" * 9])
def test_manifests_that_cannot_be_read_are_passed_over(places: Path, content: str) -> None:
    manifests = places / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "llama3.2"
    (manifests / "3b").write_text(content)
    names = [each.name for each in found_files() if each.program == "ollama"]
    assert names == ["ollama:someone/own:latest"]


@pytest.mark.parametrize("digest", ["sha256:" + "a" * 300, "sha256:a\0"])
def test_digests_that_no_file_can_have_are_passed_over(places: Path, digest: str) -> None:
    manifest = write_ollama(places / "ollama", "registry.ollama.ai/library/odd/1", "sha256:ef")
    manifest.write_text(manifest.read_text().replace('"sha256:ef"', json.dumps(digest)))
    names = [each.name for each in found_files() if each.program == "ollama"]
    assert names == ["ollama:llama3.2:3b", "ollama:someone/own:latest"]


def test_a_digest_leads_to_no_other_folder(places: Path) -> None:
    (places / "ollama" / "away").write_bytes(GGUF)
    write_ollama(places / "ollama", "registry.ollama.ai/library/sly/1", "sha256:ef")
    manifest = places / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "sly" / "1"
    manifest.write_text(manifest.read_text().replace("sha256:ef", "../away"))
    assert "sly" not in " ".join(each.name for each in found_files())


def test_a_file_of_a_repository_is_taken_from_the_cache(places: Path) -> None:
    entry = load_registry().resolve(f"{REPO}:Tiny-Q4_K_M.gguf")
    assert (entry.repo, entry.file) == (REPO, "Tiny-Q4_K_M.gguf")
    absent = load_registry().resolve(f"{REPO}@v2:Tiny-Q8_0.gguf")
    assert absent.revision == "v2"
    with pytest.raises(NotFetchedError, match="specexec pull"):
        sized(absent, offline=True)


@pytest.mark.parametrize("word", ["Q4_K_M", "q4_k_m"])
@pytest.mark.usefixtures("places")
def test_a_quantization_s_name_is_a_file_of_the_cache(computer: Computer, word: str) -> None:
    snapshot = computer.hub / "models--bartowski--Tiny-GGUF" / "snapshots" / "abc"
    (snapshot / "Tiny-Q4_K_M_L.gguf").write_bytes(GGUF)
    (snapshot / "mmproj-Q4_K_M.gguf").write_bytes(GGUF)
    offline = load_registry(offline=True)
    assert offline.resolve(f"{REPO}:{word}").file == "Tiny-Q4_K_M.gguf"
    parts = snapshot / "Q8_0"
    parts.mkdir()
    for number in (1, 2):
        (parts / f"Tiny-Q8_0-0000{number}-of-00002.gguf").write_bytes(GGUF)
    assert offline.resolve(f"{REPO}:Q8_0").file == "Q8_0/Tiny-Q8_0-00001-of-00002.gguf"
    with pytest.raises(UnknownModelError, match=r"no GGUF file 'Q6_K' of .* offline"):
        offline.resolve(f"{REPO}:Q6_K")
    (snapshot / "Other-Q4_K_M.gguf").write_bytes(GGUF)
    with pytest.raises(UnknownModelError, match=r"several GGUF files .*name one, as in .*\.gguf"):
        offline.resolve(f"{REPO}:{word}")


def test_the_hub_is_asked_for_a_quantization_that_is_not_here(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["README.md", "Tiny-Q6_K.gguf", "a/Tiny-IQ2_M.gguf"]
    with running(FakeHub({"org/tiny": dict.fromkeys(names, GGUF)})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        registry = load_registry()
        assert registry.resolve("org/tiny:Q6_K").file == "Tiny-Q6_K.gguf"
        assert registry.resolve("org/tiny:IQ2_M").file == "a/Tiny-IQ2_M.gguf"
        for word in ("Q2_K", "README"):
            with pytest.raises(UnknownModelError, match=r"It has Tiny-Q6_K\.gguf, a/Tiny-IQ2_M"):
                registry.resolve(f"org/tiny:{word}")
        with pytest.raises(UnknownModelError, match="no repository 'org/none'"):
            registry.resolve("org/none:Q6_K")


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK")
    with pytest.raises(UnknownModelError, match="is no GGUF file"):
        load_registry().resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(UnknownModelError, match=r"has no config\.json"):
        load_registry().resolve(str(tmp_path))
    for name in ("y-00001-of-00002.gguf", "y-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(GGUF)
    assert load_registry().resolve(str(tmp_path)).folder == tmp_path / "y-00001-of-00002.gguf"
    (tmp_path / "z.gguf").write_bytes(GGUF)
    with pytest.raises(UnknownModelError, match="several GGUF files: name one"):
        load_registry().resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("there", "usual"),
    [
        ("m-Q8_0 m-Q4_K_M m-Q4_K_S m-Q2_K m-BF16", "m-Q4_K_M"),
        ("m-Q8_0 m-Q5_K_S m-Q5_K_M m-Q3_K_M", "m-Q5_K_M"),
        ("m-IQ4_XS m-Q4_0 m-Q4_K_S m-UD-Q4_K_XL", "m-Q4_K_S"),
        ("m-f16 m-q8_0", "m-q8_0"),
        ("m-Q2_K m-IQ3_M m-IQ1_S", "m-IQ3_M"),
        ("m-mxfp4 m-F32", "m-mxfp4"),
        ("m", "m"),
        ("a-Q4_K_M b-Q4_K_M", None),
        ("a b", None),
        ("", None),
    ],
)
def test_a_repository_s_usual_file(there: str, usual: str | None) -> None:
    files = [f"{name}.gguf" for name in there.split()]
    for names in (files, files[::-1]):
        assert usual_file(names) == (f"{usual}.gguf" if usual else None)


def test_a_hub_id_that_holds_gguf_files_alone(
    computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pull chooses; without the file plan says what to do, and afterwards the id is the file."""
    both = {"m-Q4_K_M.gguf": GGUF, "config.json": b"{}", "model.safetensors": b""}
    repos = {
        "org/tiny": dict.fromkeys(("README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf"), GGUF),
        "org/two": dict.fromkeys(("a-Q4_K_M.gguf", "b-Q4_K_M.gguf"), GGUF),
        "org/both": both,
    }
    with running(FakeHub(repos)) as hub:
        asked_instead(hub, computer.hub, monkeypatch)
        assert "specexec pull org/tiny" in run_cli("plan", "org/tiny").error
        pulled = run_cli("pull", "org/tiny", "--yes")
        assert pulled.code == 0, pulled.err
        assert "Not here: org/tiny, 64 B, the file m-Q4_K_M.gguf" in pulled.err
        assert [each.name for each in computer.hub.rglob("*.gguf")] == ["m-Q4_K_M.gguf"]
        assert load_registry().resolve("org/tiny").file == "m-Q4_K_M.gguf"
        assert "already" in run_cli("pull", "org/tiny").err
        assert "org/two holds GGUF files alone: name one, as in org/two:a-Q4_K_M.gguf. It has " in (
            run_cli("pull", "org/two", "--yes").error
        )
        assert survey(load_registry().resolve("org/both")).entry.file is None
