"""The example chat: npm `ai` and `@durable-streams/aisdk-transport` in a browser, over our server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.docs.test_reading import ROOT
from tests.interop.conftest import follow_guide, install_packages
from tests.interop.serving import UvicornProcess
from tests.ports import free_port
from tests.server.console.conftest import TIMEOUT, ConsoleServer

EXAMPLE = ROOT / "examples" / "ai_chat"
ROOT_TOKEN = "root-" + "t" * 40
#: A number that takes the model seven seconds, far longer than to kill a server meanwhile.
LONG = 150


class ChatServer:
    """The program of the example, which can be killed and started again at the same address."""

    def __init__(self, streamfold: ConsoleServer, token: str = "") -> None:
        self.port = free_port()
        self._streamfold = streamfold.url
        self.start(token)

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def page(self, chat: str) -> str:
        return f"http://127.0.0.1:{self.port}/#{chat}"

    def start(self, token: str = "") -> None:
        command = [sys.executable, "app.py", "--streamfold", self._streamfold]
        self._process = UvicornProcess(
            [*command, "--port", str(self.port)],
            cwd=EXAMPLE,
            env={**os.environ, "S2_ACCESS_TOKEN": token},
        )

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture(scope="module")
def example() -> None:
    install_packages(EXAMPLE / "page")
    build = ["npm", "run", "--silent", "build"]
    subprocess.run(build, cwd=EXAMPLE / "page", check=True, timeout=300, capture_output=True)


@pytest.fixture(scope="module")
def streamfold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    with ConsoleServer(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def chat(example: None, streamfold: ConsoleServer) -> Iterator[ChatServer]:
    with ChatServer(streamfold) as server:
        yield server


@pytest.fixture
def window(browser: Browser) -> Iterator[Page]:
    shown = browser.new_page()
    shown.set_default_timeout(TIMEOUT)
    yield shown
    shown.close()


def ask(page: Page, text: str) -> Locator:
    """Ask, and return the element with the answer."""
    answers = page.locator("li.assistant")
    before = answers.count()
    page.get_by_placeholder("Ask").fill(text)
    page.get_by_text("Send").click()
    return answers.nth(before)


def count(last: int) -> str:
    return " ".join(str(number) for number in range(1, last + 1))


def entries(streamfold: ConsoleServer, path: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = streamfold.http.get(f"/v1/stream/chats/{path}").json()
    return read


def stored_answer(streamfold: ConsoleServer, chat: str) -> str:
    """The text that the stream of the last answer adds up to."""
    message = next(entry["message"] for entry in entries(streamfold, chat) if "message" in entry)
    chunks = entries(streamfold, f"{chat}/answers/{message['id']}")
    return "".join(chunk["delta"] for chunk in chunks if chunk["type"] == "text-delta").strip()


def await_answers(streamfold: ConsoleServer, chat: str, count: int) -> None:
    """Return once the chat has so many answers: a page shows one before it is stored there.

    Until then, the next question is refused.
    """
    deadline = time.monotonic() + 120
    while True:
        messages = [entry["message"] for entry in entries(streamfold, chat) if _is_message(entry)]
        if sum(message["role"] == "assistant" for message in messages) == count:
            return
        assert time.monotonic() < deadline, messages
        time.sleep(0.02)


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and "id" in entry.get("message", ())


def test_an_answer_goes_on_behind_a_reload_and_in_a_second_window(
    chat: ChatServer, browser: Browser, window: Page
) -> None:
    window.goto(chat.page("reload"))
    expect(ask(window, "count to 30")).to_contain_text("5")
    window.reload()
    other = browser.new_page()
    other.goto(chat.page("reload"))
    for page in (window, other):
        expect(page.locator("li")).to_have_text(["count to 30", count(30)])
        expect(page.get_by_role("status")).to_have_text("ready")
    other.close()


def test_a_page_gets_the_whole_answer_though_both_servers_are_restarted(
    chat: ChatServer, streamfold: ConsoleServer, window: Page
) -> None:
    window.goto(chat.page("restart"))
    answer = ask(window, f"count to {LONG}")
    expect(answer).to_contain_text("5")
    chat.kill()
    chat.start()
    expect(answer).to_contain_text("20")
    streamfold.stop()
    streamfold.start()
    expect(answer).to_have_text(count(LONG))
    expect(window.get_by_role("status")).to_have_text("ready")
    assert stored_answer(streamfold, "restart") == count(LONG)
    workers = [entry for entry in entries(streamfold, "restart") if "worker" in entry]
    assert len(workers) == 2


def test_a_stop_ends_the_answer_in_all_windows_and_for_good(
    chat: ChatServer, browser: Browser, window: Page, streamfold: ConsoleServer
) -> None:
    window.goto(chat.page("stop"))
    expect(ask(window, "count to 10000")).to_contain_text("5")
    other = browser.new_page()
    other.goto(chat.page("stop"))
    expect(other.locator("li.assistant")).to_contain_text("5")
    window.get_by_text("Stop").click()
    for page in (window, other):
        expect(page.get_by_role("status")).to_have_text("ready")
        expect(page.locator("li.assistant")).to_have_text(stored_answer(streamfold, "stop"))
    other.close()
    await_answers(streamfold, "stop", 1)
    expect(ask(window, "count to 2")).to_have_text(count(2))


def test_a_worker_that_was_taken_over_writes_nothing_more(
    chat: ChatServer, streamfold: ConsoleServer
) -> None:
    message = {"id": "q1", "role": "user", "parts": [{"type": "text", "text": f"count to {LONG}"}]}
    with ChatServer(streamfold) as second, httpx.Client(timeout=60) as http:
        question = {"id": "taken", "messages": [message], "trigger": "submit-message"}
        first = f"http://127.0.0.1:{chat.port}/api/chat"
        answer = http.post(first, json=question).raise_for_status()
        # Whoever reads an open answer works on it.
        stream = f"http://127.0.0.1:{second.port}{answer.headers['location']}?offset=-1"
        assert '"finish"' in http.get(stream).text
    assert stored_answer(streamfold, "taken") == count(LONG)
    claims = [chunk for chunk in entries(streamfold, "taken/answers/q1") if "data" in chunk]
    assert len(claims) == 2


def test_entries_of_others_and_a_model_that_fails_do_not_end_the_chat(
    chat: ChatServer, streamfold: ConsoleServer, window: Page
) -> None:
    window.goto(chat.page("others"))
    ask(window, "hello")
    expect(window.get_by_role("alert")).to_contain_text("Ask me to count to a number.")
    await_answers(streamfold, "others", 1)
    for other in ({"from": "elsewhere"}, None, {"message": {"role": "system"}}, [1]):
        streamfold.http.post("/v1/stream/chats/others", json=[other]).raise_for_status()
    window.reload()
    ask(window, "count to 3")
    # The answer that failed may be shown again first, as an empty one.
    expect(window.locator("li.assistant").last).to_have_text(count(3))


def test_a_chat_whose_token_has_gone_says_so_and_goes_on_with_a_new_one(
    example: None, tmp_path: Path, window: Page
) -> None:
    scope = {"streams": {"prefix": "chats/"}, "basins": {"prefix": ""},
             "ops": ["create-stream", "append", "read"]}  # fmt: skip
    with ConsoleServer(tmp_path, ["--auth"], ROOT_TOKEN) as streamfold:
        streamfold.create("durable-streams")

        def issue(name: str) -> str:
            body = {"id": name, "scope": scope}
            answer = streamfold.http.post("/v1/access-tokens", json=body).raise_for_status()
            return str(answer.json()["access_token"])

        with ChatServer(streamfold, issue("first")) as chat:
            window.goto(chat.page("token"))
            expect(ask(window, "count to 2")).to_have_text(count(2))
            await_answers(streamfold, "token", 1)
            streamfold.http.delete("/v1/access-tokens/first").raise_for_status()
            ask(window, "count to 3")
            alert = window.get_by_role("alert")
            expect(alert).to_contain_text("The chat is unavailable at the moment.")
            chat.kill()
            chat.start(issue("second"))
            alert.get_by_text("Ask again").click()
            expect(window.locator("li.assistant")).to_have_text([count(2), count(3)])


@pytest.mark.usefixtures("example", "durable_packages")
def test_the_store_for_assistant_ui_works_over_a_restart(streamfold: ConsoleServer) -> None:
    node = subprocess.Popen(
        ["node", "resumable.mjs"],
        cwd=Path(__file__).parent / "durable",
        env={**os.environ, "STREAMFOLD_URL": streamfold.url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdout is not None
    shown = [next(node.stdout), next(node.stdout)]
    assert shown[1] == "restart\n"
    streamfold.stop()
    streamfold.start()
    rest, _ = node.communicate("restarted\n", timeout=300)
    assert node.returncode == 0, rest
    assert [*shown, *rest.splitlines()].count("restart\n") == 1
    assert ("".join(shown) + rest).count("ok ") == 5


@pytest.mark.usefixtures("example")
def test_the_guide_can_be_followed(tmp_path: Path) -> None:
    follow_guide(ROOT / "docs/guides/ai-chat.md", tmp_path)
