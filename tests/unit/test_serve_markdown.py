"""The page's markdown, run by Node on a document that holds what is appended to it."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

NODE = shutil.which("node")
if NODE is None:
    pytest.skip("there is no Node here", allow_module_level=True)

DOCUMENT = """
class Item {
  constructor(name) { this.name = name; this.items = []; }
  append(...items) { this.items.push(...items); }
  addEventListener() {}
  get html() {
    const inner = this.items.map((one) => one.html ?? one.replaceAll("<", "&lt;")).join("");
    const address = this.href ? ` href="${this.href}"` : "";
    return this.name ? `<${this.name}${address}>${inner}</${this.name}>` : inner;
  }
}
const text = (words) => { const item = new Item(""); item.append(words); return item; };
globalThis.navigator ??= {};
globalThis.document = {
  createElement: (name) => new Item(name),
  createDocumentFragment: () => new Item(""),
  createTextNode: text,
};
let read = "";
process.stdin.on("data", (part) => (read += part)).on("end", async () => {
  const { rendered } = await import("./markdown.mjs");
  console.log(JSON.stringify(JSON.parse(read).map((one) => rendered(one).html)));
});
"""
SHOWN = {
    "# Title ##\n#x": "<h2>Title</h2><p>#x</p>",
    "# C#": "<h2>C</h2>",
    "`a<b>` ``a`b`` ` c ` `d": "<code>a&lt;b></code> <code>a`b</code> <code>c</code> `d",
    "**b** __too__ *it* _as well_":
        "<strong>b</strong> <strong>too</strong> <em>it</em> <em>as well</em>",
    "**a *b* c** 2*3*4 snake_case_name":
        "<strong>a <em>b</em> c</strong> 2*3*4 snake_case_name",
    '[a](https://x.org "b") ![c](https://x.org/d.png)':
        '<a href="https://x.org">a</a> <a href="https://x.org/d.png">c</a>',
    "[b](javascript:alert(1))": "b (javascript:alert(1)",
    "see https://x.org/a_b_c, or [ https://":
        'see <a href="https://x.org/a_b_c">https://x.org/a_b_c</a>, or [ https://',
    "- one\n  - deeper\n- two":
        "<ul><li><p>one</p><ul><li>deeper</li></ul></li><li>two</li></ul>",
    "| a | b |\n|---|:-:|\n| 1 | 2 |":
        "<th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td>",
}  # fmt: skip
# Each with a stretch that a pattern which looks for the other end of it may try again and again.
SHAPES = [
    "`a``", "` `` ", "**a ", "*a ", "_a ", "__a ", "**__*_", "[", "![", "[](", '[](a "', "http://",
    "http://!! ", "# ", "- ", "|a\n-x", ">",
]  # fmt: skip
LENGTH = 300_000


@pytest.fixture
def html(tmp_path: Path):
    page = resources.files("specexec_cli.serve") / "page" / "markdown.js"
    (tmp_path / "markdown.mjs").write_text(page.read_text())
    (tmp_path / "document.mjs").write_text(DOCUMENT)

    def rendered(*texts: str) -> list[str]:
        run = subprocess.run(
            [str(NODE), "document.mjs"], cwd=tmp_path, input=json.dumps(texts), text=True,
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip
        found: list[str] = json.loads(run.stdout)
        return found

    return rendered


def test_markdown_is_shown(html) -> None:
    for text, told, shown in zip(SHOWN, SHOWN.values(), html(*SHOWN), strict=True):
        assert told in shown, text


def test_work_grows_with_the_text_alone(html) -> None:
    """Were it tried twice for each place, a text of this length would take minutes."""
    runs = "".join("`" * (1 + number % 600) + " " for number in range(LENGTH // 300))
    spaces = " " * LENGTH
    texts = [shape * (LENGTH // len(shape)) for shape in SHAPES]
    texts += [runs, f"#{spaces}x", f"# x{spaces}x", f"-{spaces}x\u2028y", f"|a|\n{'-' * LENGTH}x"]
    assert len(html(*texts)) == len(texts)
