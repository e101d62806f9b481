"""Training text for the demo pair: the standard library's source and chat from its docstrings.

Everything comes from the running interpreter: module source files, and question/answer turns
made from the docstrings of importable modules. Whole modules (``HELD_OUT_MODULES``) and
function/phrasing pairs (``HELD_OUT_CHAT``) never reach training; the held-out prompts are
built from them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import itertools
import random
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

Message = dict[str, str]

SKIP_DIRS = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "ensurepip",
    "pydoc_data",
    "__pycache__",
    "lib-dynload",
    "turtledemo",
    "tkinter",
    "distutils",
    "msilib",
}
# Tables and text that hardly looks like what a prompt asks for.
SKIP_FILES = {
    "encodings",
    "html/entities.py",
    "_sysconfigdata",
    "token.py",
    "keyword.py",
    "locale.py",
    "mimetypes.py",
    "stringprep.py",
    "_compat_pickle.py",
    "re/_casefix.py",
    "turtle.py",
    "_pydecimal.py",
    "email/_header_value_parser.py",
}
SKIP_IMPORTS = {
    "antigravity",
    "curses",
    "this",
    "idlelib",
    "test",
    "lib2to3",
    "turtledemo",
    "turtle",
    "tkinter",
    "ensurepip",
    "pydoc_data",
    "distutils",
    "__main__",
    "nturl2path",
}
HELD_OUT_MODULES = (
    "calendar",
    "cmd",
    "filecmp",
    "getopt",
    "graphlib",
    "imghdr",
    "netrc",
    "plistlib",
    "quopri",
    "sched",
    "timeit",
    "trace",
)
COMMON_MODULES = (
    "os",
    "os.path",
    "re",
    "json",
    "math",
    "itertools",
    "collections",
    "functools",
    "random",
    "string",
    "pathlib",
    "datetime",
    "subprocess",
    "sys",
    "time",
    "shutil",
    "glob",
    "csv",
    "operator",
    "copy",
    "statistics",
    "heapq",
    "bisect",
    "textwrap",
    "tempfile",
    "logging",
    "threading",
    "argparse",
    "hashlib",
    "base64",
    "struct",
    "contextlib",
    "dataclasses",
    "enum",
    "typing",
    "io",
    "pickle",
    "uuid",
    "decimal",
    "fractions",
    "urllib.parse",
    "secrets",
    "inspect",
    "socket",
    "queue",
    "zlib",
)
QUESTIONS = (
    "What does {x} do?",
    "How do I use {x}?",
    "Explain {x}.",
    "What is {x} for?",
    "What is {x}?",
    "Describe {x}.",
    "Tell me about {x}.",
    "Can you explain {x}?",
    "When should I use {x}?",
    "what does {x} do",
)
FOLLOW_UPS = ("And {x}?", "What about {x}?", "And what does {x} do?")
HELD_OUT_CHAT = (
    ("os.path.join", 0),
    ("len", 0),
    ("json.dumps", 1),
    ("str.split", 2),
    ("re.sub", 3),
    ("math.sqrt", 0),
    ("itertools.chain", 4),
    ("functools.partial", 1),
    ("random.shuffle", 0),
    ("dict.get", 5),
    ("list.append", 0),
    ("collections.Counter", 4),
    ("os.listdir", 6),
    ("shutil.copy", 0),
    ("sorted", 7),
    ("subprocess.run", 1),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful Python assistant.",
    "You answer questions about the Python standard library.",
    "Be brief.",
)
SMALL_TALK = (
    ("Hello", "Hello! Ask me about a function of the Python standard library."),
    ("Hi", "Hello! Ask me about a function of the Python standard library."),
    ("Hello!", "Hello! Ask me about a function of the Python standard library."),
    ("Who are you?", "I am a small demo model trained on the Python standard library."),
    ("What are you?", "I am a small demo model trained on the Python standard library."),
    ("What can you do?", "I can say what functions of the Python standard library do."),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
)


@dataclass(frozen=True)
class Gist:
    """One documented object: dotted name, answer text, sampling weight."""

    name: str
    answer: str
    weight: float


def stdlib_files() -> dict[str, str]:
    """Return {relative path: source} of the standard library, tests and big tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        rel = path.relative_to(root)
        name = rel.as_posix()
        if SKIP_DIRS & set(rel.parts) or any(name.startswith(s) for s in SKIP_FILES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if 200 <= len(text) <= 250_000:
            found[name] = text.expandtabs(8).replace("\f", "")
    return found


def is_held_out(name: str) -> bool:
    """Say whether a stdlib path or dotted name belongs to a held-out module."""
    top = name.split("/")[0].removesuffix(".py").split(".")[0]
    return top in HELD_OUT_MODULES


def split_top_level(text: str) -> list[str]:
    """Cut a source file before every top-level def, class or decorator that follows a blank."""
    starts = [m.start() + 1 for m in re.finditer(r"\n(?=(?:@|def |class |async def ))", text)]
    kept = [s for s in starts if not text[:s].rstrip(" \n").endswith(")") or text[s - 2] == "\n"]
    bounds = [0, *kept, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds) if text[a:b].strip()]


def function_texts(text: str) -> list[str]:
    """Return every function or method of a file as its own dedented document."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            if 5 <= body.count("\n") <= 80:
                found.append(textwrap.dedent(body))
    return found


def code_documents(files: dict[str, str], rng: random.Random) -> Iterator[str]:
    """Yield one epoch of code: files cut at random top-level places, plus single functions."""
    for text in files.values():
        piece = ""
        for part in split_top_level(text):
            if piece and rng.random() < 0.3:
                yield piece
                piece = ""
            piece += part
        yield piece
        for body in function_texts(text):
            if rng.random() < 0.35:
                yield body


def _importable_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the importable, side-effect-free public modules by dotted name, sorted."""
    names = {n for n in sys.stdlib_module_names if not n.startswith("_")} - SKIP_IMPORTS
    names |= {n for n in COMMON_MODULES if "." in n}
    names |= {
        "concurrent.futures",
        "xml.etree.ElementTree",
        "http.client",
        "http.server",
        "urllib.request",
        "email.message",
        "importlib.util",
        "unittest.mock",
        "logging.handlers",
        "multiprocessing.pool",
        "collections.abc",
        "html.parser",
    }
    for name in sorted(names):
        sink = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink):
            warnings.simplefilter("ignore")
            try:
                yield name, importlib.import_module(name)
            except (ImportError, OSError):
                continue


def _signature(name: str, obj: Any, doc: str) -> tuple[str, str]:
    """Return ("name(args)", docstring without a leading signature line)."""
    short = name.rsplit(".", 1)[-1]
    first, _, rest = doc.partition("\n")
    if re.match(rf"^(?:\w+\.)*{re.escape(short)}\(", first):
        head, dash, tail = re.match(r"(.*?)(?:\s+(--?>?)\s+(.*))?$", first).groups()  # type: ignore
        tail = tail if dash in ("-", "--") else ""
        return name + head[head.index("(") :], (tail + "\n" + rest).strip()
    with contextlib.suppress(ValueError, TypeError, AttributeError, NameError):
        text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(obj)))
        text = text.replace("(self, /, ", "(").replace("(self, /)", "()")
        text = text.replace("(self, ", "(").replace("(self)", "()").replace(", /", "")
        if len(text) < 160:
            return name + text, doc
    return name, doc


def _answer(name: str, obj: Any) -> str | None:
    """Return the gist of an object: its signature line, then its first paragraph."""
    doc = inspect.getdoc(obj)
    if not doc or len(doc) < 12:
        return None
    sig, rest = (name, doc) if inspect.ismodule(obj) else _signature(name, obj, doc)
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", rest) if p.strip()]
    if not paragraphs:
        return None
    gist = paragraphs[0]
    if len(gist) > 320:
        cut = gist.rfind(". ", 0, 320)
        gist = gist[: cut + 1] if cut > 40 else gist[:320].rsplit(" ", 1)[0] + " ..."
    return f"{sig}\n{gist}" if re.search(r"0x[0-9a-f]{6,}", gist) is None else None


def _members(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public functions, classes and methods of a module with dotted names."""
    prefix = "" if name == "builtins" else name + "."
    public = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    for attr in sorted(set(public)):
        obj = getattr(module, attr, None)
        if not (inspect.isclass(obj) or callable(obj)) or inspect.ismodule(obj):
            continue
        yield prefix + attr, obj
        if inspect.isclass(obj) and not issubclass(obj, BaseException):
            for key in sorted(vars(obj)):
                if key[0] != "_" and callable(getattr(obj, key, None)):
                    yield f"{prefix}{attr}.{key}", getattr(obj, key)


def collect_gists() -> list[Gist]:
    """Return the gist of every documented public stdlib object, held-out modules left out."""
    found: dict[str, Gist] = {}
    for name, module in _importable_modules():
        if is_held_out(name):
            continue
        common = name in COMMON_MODULES or name == "builtins"
        entries = [(name, module), *_members(name, module)]
        for dotted, obj in entries:
            answer = _answer(dotted, obj)
            if answer is None or dotted in found:
                continue
            depth = dotted.count(".") - name.count(".")
            weight = (6.0 if depth < 2 else 2.0) if common else 1.0
            if dotted in {f for f, _ in HELD_OUT_CHAT}:
                weight = 30.0
            if name == "builtins" and dotted.split(".")[0] in {"str", "list", "dict", "set"}:
                weight = 6.0
            found[dotted] = Gist(dotted, answer, weight)
    return list(found.values())


def _question(name: str, rng: random.Random) -> str:
    """Return a random question about ``name``, never a held-out function/phrasing pair."""
    while True:
        index = rng.randrange(len(QUESTIONS))
        if (name, index) not in HELD_OUT_CHAT:
            break
    shown = f"`{name}`" if rng.random() < 0.1 and not _has_held_out(name) else name
    return QUESTIONS[index].format(x=shown)


def _has_held_out(name: str) -> bool:
    return any(name == held for held, _ in HELD_OUT_CHAT)


def chat_documents(gists: list[Gist], count: int, rng: random.Random) -> Iterator[list[Message]]:
    """Yield ``count`` conversations: one to three turns about weighted random objects."""
    weights = [g.weight for g in gists]
    for _ in range(count):
        messages: list[Message] = []
        if rng.random() < 0.15:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        turns = rng.choices((1, 2, 3), (0.7, 0.2, 0.1))[0]
        for turn, gist in enumerate(rng.choices(gists, weights, k=turns)):
            if rng.random() < 0.02:
                ask, answer = rng.choice(SMALL_TALK)
            elif turn and rng.random() < 0.3:
                ask, answer = rng.choice(FOLLOW_UPS).format(x=gist.name), gist.answer
            else:
                ask, answer = _question(gist.name, rng), gist.answer
            messages.append({"role": "user", "content": ask})
            messages.append({"role": "assistant", "content": answer})
        yield messages


def _code_prompt(bodies: list[str], tokens_of: Any, skip: int) -> str:
    """Return the first half of the ``skip``-th function whose half has 30 to 200 tokens."""
    seen = 0
    for body in bodies:
        lines = body.splitlines(keepends=True)
        half = "".join(lines[: max(3, len(lines) // 2)])
        if 40 <= tokens_of(half) <= 180:
            if seen == skip:
                return half
            seen += 1
    return ""


def held_out_prompts(tokens_of: Any) -> list[dict[str, str]]:
    """Return the 40 held-out prompts: 24 code prefixes, 16 bare user questions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    prompts = []
    for module in HELD_OUT_MODULES:
        bodies = function_texts((root / f"{module}.py").read_text(encoding="utf-8").expandtabs(8))
        for skip in (0, 1):
            text = _code_prompt(bodies, tokens_of, skip)
            if text:
                prompts.append({"id": f"code-{module}-{skip}", "kind": "code", "prompt": text})
    for name, index in HELD_OUT_CHAT:
        text = QUESTIONS[index].format(x=name)
        prompts.append({"id": f"chat-{name}", "kind": "chat", "prompt": text})
    return prompts
