"""The page in a real browser: what a person does on it, with keys, on wide and narrow screens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import PROGRAM, Browser
from serving import Served, served, wait_until_idle

from specexec_cli.serve.models import Offered
from specexec_cli.session import Session

if PROGRAM is None:
    pytest.skip("there is no Chromium here", allow_module_level=True)

MESSAGES = "[...document.querySelectorAll('#messages > li')]"
READY = "document.getElementById('stop').hidden && !document.getElementById('send').disabled"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Session.open(model="demo", offline=True) as session, served(session) as found:
        yield found


@pytest.fixture
def page(server: Served, tmp_path: Path) -> Iterator[Browser]:
    """A browser that has never been there before."""
    with Browser(tmp_path / "profile") as browser:
        browser.resize(1200, 800)
        browser.open(server.url)
        browser.wait("document.getElementById('model').textContent.startsWith('demo')")
        yield browser
        browser.run("1")  # what it had to say by now
        assert browser.complaints == []
        outside = [url for url in browser.requested if not url.startswith(server.url)]
        assert outside == [], "everything comes from the server itself"


def send(page: Browser, text: str) -> None:
    page.run("document.getElementById('draft').focus()")
    page.type(text)
    page.press("Enter")


def replied(page: Browser, messages: int) -> list[str]:
    page.wait(f"{READY} && {MESSAGES}.length === {messages}")
    return page.run(f"{MESSAGES}.map((one) => one.querySelector('.body').textContent)")


def settle(page: Browser, **settings: object) -> None:
    page.run(f"localStorage.setItem('specexec.settings', JSON.stringify({json.dumps(settings)}))")
    page.open(page.run("location.href"))
    page.wait("document.getElementById('model').textContent.startsWith('demo')")


def test_messages_replies_and_conversations(page: Browser, server: Served) -> None:
    settle(page, max_tokens=12)
    send(page, "hello")
    first = replied(page, 2)
    assert first[0] == "hello"
    assert first[1].strip()
    assert "tokens/s" in page.run(f"{MESSAGES}[1].querySelector('.after').textContent")
    assert page.run("document.getElementById('said').textContent").startswith("Reply: ")
    # another conversation; both are there after the page was closed and opened again
    page.run("document.getElementById('new-chat').click()")
    assert page.run(f"{MESSAGES}.length") == 0
    send(page, "<b>second</b> & more")
    second = replied(page, 2)
    assert second[0] == "<b>second</b> & more"
    page.open(server.url)
    assert page.run("document.querySelectorAll('#chat-list li').length") == 2
    assert replied(page, 2) == second
    page.run("document.querySelectorAll('#chat-list li')[1].querySelector('button').click()")
    assert replied(page, 2) == first
    page.run("document.querySelector('#chat-list [aria-label^=\"Delete hello\"]').click()")
    assert page.run("document.querySelectorAll('#chat-list li').length") == 1


def test_stop_regenerate_and_edit(page: Browser, server: Served) -> None:
    settle(page, max_tokens=3000, temperature=1.8)
    send(page, "hello")
    page.wait(f"{MESSAGES}.length === 2 && {MESSAGES}[1].querySelector('.body').textContent")
    page.wait("/pass \\d+ · layer \\d+ of 8/.test(document.getElementById('live').textContent)")
    page.press("Escape")
    stopped = replied(page, 2)
    assert "stopped" in page.run(f"{MESSAGES}[1].querySelector('.after').textContent")
    wait_until_idle(server.url)
    settle(page, max_tokens=12, temperature=1.8)
    page.run("document.getElementById('again').click()")
    again = replied(page, 2)
    assert again[0] == "hello"
    assert again[1] != stopped[1]
    page.run(f"{MESSAGES}[0].querySelector('.after button').click()")
    page.run("document.activeElement.select()")
    page.type("goodbye")
    page.press("Enter")
    assert replied(page, 2)[0] == "goodbye"


def test_a_conversation_deleted_while_its_reply_comes_stays_deleted(
    page: Browser, server: Served
) -> None:
    settle(page, max_tokens=3000, temperature=1.8)
    send(page, "hello")
    page.wait(f"{MESSAGES}.length === 2 && {MESSAGES}[1].querySelector('.body').textContent")
    page.run("document.querySelector('#chat-list [aria-label^=\"Delete hello\"]').click()")
    page.wait(READY)
    wait_until_idle(server.url)
    page.open(server.url)
    page.wait("document.getElementById('model').textContent.startsWith('demo')")
    kept = "Object.keys(localStorage).filter((key) => key.startsWith('specexec.chat.')).length"
    assert page.run(kept) == 0


def test_a_message_edited_while_its_reply_comes(page: Browser, server: Served) -> None:
    settle(page, max_tokens=3000, temperature=1.8)
    send(page, "hello")
    page.wait(f"{MESSAGES}.length === 2 && {MESSAGES}[1].querySelector('.body').textContent")
    page.run(f"{MESSAGES}[0].querySelector('.after button').click()")
    page.wait(f"{READY} && {MESSAGES}[0].querySelector('textarea') === document.activeElement")
    page.press("Escape")
    assert "stopped" in page.run(f"{MESSAGES}[1].querySelector('.after').textContent")
    wait_until_idle(server.url)


@pytest.mark.parametrize("name", ["top-p", "min-p"])
def test_what_goes_wrong_is_said(page: Browser, name: str) -> None:
    settle(page, **{name.replace("-", "_"): 7})
    send(page, "hello")
    page.wait(f"document.getElementById('problem').textContent.includes('{name} must be')")
    assert replied(page, 1) == ["hello"]
    page.complaints.clear()  # the browser tells of each answer that is an error


def test_a_message_can_be_typed_at_once(page: Browser) -> None:
    page.wait("document.activeElement === document.getElementById('draft')")


def test_line_breaks_are_kept(page: Browser) -> None:
    said = {"role": "assistant", "content": "one\ntwo  three\n\n- a\n  b\n- c"}
    chat = {"id": "x", "messages": [said], "changed": 1}
    page.run(f"localStorage.setItem('specexec.chat.x', JSON.stringify({json.dumps(chat)}))")
    page.open(page.run("location.href"))
    page.wait(f"{MESSAGES}.length === 1")
    shown = page.run(f"{MESSAGES}[0].querySelector('.body').innerText")
    assert "one\ntwo three\n" in shown
    assert "a\nb\n" in shown


def test_a_server_that_is_gone_is_told_of_in_words(page: Browser) -> None:
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); 1")
    send(page, "hello")
    problem = "document.getElementById('problem').textContent"
    page.wait(f"{problem}.startsWith('The server does not answer: start it again')")
    cut = (
        "new ReadableStream({ start(it) { it.enqueue(new TextEncoder().encode('data: ')); },"
        " pull(it) { it.error(new TypeError('network error')); } })"
    )
    page.run(f"window.fetch = () => Promise.resolve(new Response({cut})); 1")
    send(page, "again")
    page.wait(f"{problem}.startsWith('The server ended the connection before')")


def test_a_conversation_goes_on_with_another_model(
    page: Browser, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page.run("document.getElementById('models').hidden"), "there is one alone"
    (here,) = server.models.offered
    there = Offered(names=("other",), open=here.open)
    monkeypatch.setattr(server.models, "offered", (here, there))
    settle(page, max_tokens=4)
    send(page, "hello")
    replied(page, 2)
    page.run(
        "const menu = document.getElementById('models'); menu.value = 'other';"
        " menu.dispatchEvent(new Event('change')); 1"
    )
    page.wait("document.getElementById('model').textContent.startsWith('other')")
    # the server is asked for that model, now and when the page was opened again
    page.run(
        "window.asked = []; const usual = window.fetch; window.fetch = (address, request) => {"
        " if (request.body) window.asked.push(JSON.parse(request.body));"
        " return Promise.reject(new TypeError('no')); }; 1"
    )
    send(page, "more")
    page.wait("window.asked.length === 1 && " + READY)
    asked = page.run("window.asked[0]")
    assert (asked["model"], len(asked["messages"])) == ("other", 3)
    page.open(server.url)
    page.wait("document.getElementById('models').value === 'other'")


def test_markdown_is_never_html(page: Browser) -> None:
    text = (
        "# Title\nSome **bold**, *it*, `a<b>` and [a](https://x.org), [b](javascript:alert(1))\n"
        "<img src=x onerror=alert(1)>\n\n- one\n  - deeper\n- two\n\n3. c\n\n"
        "```python\ndef f():\n    return '<i>'\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quoted"
    )
    html = page.run(
        f"import('/page/markdown.js').then((m) => {{ const d = document.createElement('div');"
        f" d.append(m.rendered({json.dumps(text)})); return d.innerHTML; }})"
    )
    for part in (
        "<h2>Title</h2>", "<strong>bold</strong>", "<em>it</em>", "<code>a&lt;b&gt;</code>",
        '<a href="https://x.org" target="_blank" rel="noopener noreferrer">a</a>',
        "b (javascript:alert(1))", "&lt;img src=x onerror=alert(1)&gt;", '<ol start="3">',
        "<ul><li><p>one</p><ul><li>deeper</li></ul></li><li>two</li></ul>",
        "<code>def f():\n    return '&lt;i&gt;'</code>", "<th>a</th>", "<td>2</td>",
        "<blockquote><p>quoted</p></blockquote>",
    ):  # fmt: skip
        assert part in html
    assert "<img" not in html
    # half a text, as it streams, is shown too
    for length in range(0, len(text), 7):
        page.run(
            f"import('/page/markdown.js').then((m) => m.rendered({json.dumps(text[:length])}) && 1)"
        )


def test_markdown_nested_without_end_is_shown(page: Browser) -> None:
    lists = "\n".join(f"{'  ' * depth}- x" for depth in range(300))
    for text in (">" * 4000, ">" * 4000 + " x\n" * 3, lists):
        shown = page.run(
            f"import('/page/markdown.js').then((m) => m.rendered({json.dumps(text)}).textContent)"
        )
        assert shown.count(">") >= text.count(">") - 40
        assert shown.count("x") == text.count("x")


@pytest.mark.parametrize("clipboard", [True, False])
def test_code_is_copied_where_there_is_a_clipboard(page: Browser, clipboard: bool) -> None:
    hide = "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
    if not clipboard:
        page.run(f"{hide} && 1")
    html = page.run(
        "import('/page/markdown.js').then((m) => { const d = document.createElement('div');"
        " d.append(m.rendered('```\\ncode\\n```')); return d.innerHTML; })"
    )
    assert ("Copy</button>" in html) is clipboard


@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_the_screen(page: Browser, width: int) -> None:
    settle(page, max_tokens=8)
    send(page, "x" * 300)
    replied(page, 2)
    page.resize(width, 740)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.documentElement.scrollHeight") <= 740
    shown = page.run("getComputedStyle(document.getElementById('chats')).display")
    assert (shown == "none") is (width == 360)


def test_every_control_has_a_name_and_is_reached_by_keys(page: Browser) -> None:
    page.run("document.getElementById('show-settings').click()")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node for node in nodes
        if node.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "link")
        and not node["ignored"]
    ]  # fmt: skip
    assert len(controls) >= 8
    assert all(node["name"]["value"].strip() for node in controls)
    page.press("Escape")
    page.wait("!document.getElementById('settings').open")
    seen = []
    page.run("document.body.focus()")
    for _ in range(8):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.className"))
    assert {"skip", "show-settings", "new-chat", "draft", "send"} <= set(seen)
