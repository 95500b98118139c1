"""The page in a real browser, against a real server process around the fake device.

Left out where there is no browser.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser import Browser, open_browser
from tests.fake_server import ServerProcess

if TYPE_CHECKING:
    from selenium.webdriver.remote.webelement import WebElement

pytestmark = pytest.mark.browser

KEY = "sk-test-0123456789"
QUOTES = 'It\'s "quoted" \\ `$HOME` !\nsecond line é 漢 🙂'
HOSTILE = """<script>window.pwned = 1</script> <img src=x onerror="window.pwned = 2">
<svg onload=window.pwned=3> <iframe srcdoc="<script>top.pwned=4</script>"></iframe> <style>* { display: none }</style>
[a](javascript:window.pwned=5) [b](JAVASCRIPT:window.pwned=6) [c](data:text/html,<script>alert(1)</script>)
[d]( javascript:x) [e](vbscript:x) [f](/admin/stats) [g](https://safe.example/"onmouseover="window.pwned=7)
![h](https://tracker.example/pixel.png) <https://safe.example/<b>> **<b>bold</b>** `<i>code</i>`

```"><script>window.pwned=8</script>
</code></pre><script>window.pwned = 9</script>
```

| <script>window.pwned=10</script> | x |
|---|---|
| <img src=x onerror=window.pwned=11> | [i](javascript:1) |
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def parrot() -> Iterator[ServerProcess]:
    """A server that answers a chat with its last message."""
    with ServerProcess("--served-model-name", "parrot") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerProcess]:
    with ServerProcess("--max-running", "4", "--api-key", KEY) as process:
        yield process.wait_ready()


@pytest.fixture
def page(browser: Browser, parrot: ServerProcess) -> Iterator[Browser]:
    """The page as a new visitor finds it; the console must stay free of errors."""
    browser.open(parrot.url)
    browser.errors()
    yield browser
    assert browser.errors() == []
    browser.run("localStorage.clear()")


def say(page: Browser, text: str) -> None:
    # send_keys cannot type characters beyond the Basic Multilingual Plane, and a line break would send.
    page.run("composer.value = arguments[0]", text)
    page.element("#composer").send_keys(Keys.ENTER)


def ask(page: Browser, text: str) -> None:
    """Asks, and waits for the end of the answer."""
    num_answers = len(page.elements(".assistant footer"))
    say(page, text)
    page.wait(lambda: len(page.elements(".assistant footer")) > num_answers)


def run_curl(command: str, **environ: str) -> str:
    """The output of the command, which must succeed."""
    strict = command.replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(
        ["bash", "-c", strict], env=os.environ | environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def press(page: Browser, *keys: str) -> None:
    for key in keys:
        ActionChains(page.driver, duration=0).send_keys(key).perform()


def tab_to(page: Browser, selector: str, *, back: bool = False) -> None:
    """Presses Tab until the element has the focus; every stop on the way must show an outline."""
    look = "const one = document.activeElement; return [one.matches(arguments[0]), getComputedStyle(one).outlineStyle, one.id]"
    for _ in range(80):
        keys = ActionChains(page.driver, duration=0)
        if back:
            keys.key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
        else:
            keys.send_keys(Keys.TAB).perform()
        is_there, outline, name = page.run(look, selector)
        assert outline != "none", name
        if is_there:
            return
    raise AssertionError(f"Tab never reaches {selector}")


def test_an_answer_grows_and_then_says_what_it_took(page: Browser) -> None:
    words = "word " * 60
    say(page, words)
    page.wait_text(".assistant .body", "word word")
    # In one call, because the answer goes on meanwhile.
    early, is_busy, button = page.run(
        "const answer = document.querySelector('.assistant'); return [answer.querySelector('.body').innerText,"
        " answer.ariaBusy, document.querySelector('#send').innerText]"
    )
    assert button == "Stop" and len(early) < len(words) - 1 and is_busy == "true"
    page.wait(lambda: len(page.text(".assistant .body")) > len(early))
    page.wait_text("#send", "Send")
    assert page.text(".assistant .body") == words.strip()
    assert page.element(".assistant").get_attribute("aria-busy") == "false"
    note = page.text(".assistant .note")
    assert "299 tokens in · 299 out · TTFT " in note and " tok/s · finished" in note
    assert "prefill" in str(page.element(".assistant .note").get_attribute("title"))


def test_markdown_becomes_elements(page: Browser) -> None:
    ask(
        page,
        "## Title\n\n1. **one**\n2. `two`\n\n| a | b |\n|--|--:|\n| c | d |\n\n```python\nx = '<b>'\n```\nSee https://x.example.",
    )
    tags = "return [...document.querySelectorAll('.assistant .body *')].map((one) => one.localName)"
    assert set(page.run(tags)) >= {"h4", "ol", "li", "strong", "code", "table", "td", "pre", "a"}
    assert page.text(".assistant pre") == "x = '<b>'" and "python" in page.text(".assistant .code-head")


def test_hostile_text_stays_text(page: Browser, parrot: ServerProcess) -> None:
    ask(page, HOSTILE)
    answer = page.text(".assistant .body")
    assert "<script>window.pwned = 1</script>" in answer and "</code></pre><script>" in answer
    bad = "script, img, svg, iframe, object, embed, style, link, meta, base, form, input"
    for _ in range(2):
        assert page.run("return document.querySelectorAll(`#messages :is(${arguments[0]})`).length", bad) == 0
        assert page.run("return window.pwned") is None
        names = "return [...document.querySelectorAll('.assistant .body *')].flatMap((one) => one.getAttributeNames())"
        assert set(page.run(names)) <= {"href", "target", "rel", "class", "tabindex", "type", "start"}
        links = page.run("return [...document.querySelectorAll('#messages a')].map((one) => one.protocol)")
        assert set(links) == {"https:"} and len(links) >= 3
        page.open(parrot.url)  # the second pass checks the stored conversation


def test_conversations_survive_a_reload_and_can_be_deleted(page: Browser, parrot: ServerProcess) -> None:
    ask(page, "first question")
    page.element("#new-chat").click()
    ask(page, "second question")
    page.open(parrot.url)
    assert page.text(".assistant .body") == "second question"
    assert [one.text for one in page.elements(".choose")] == ["second question", "first question"]
    page.elements(".choose")[1].click()
    assert page.text(".assistant .body") == "first question"
    page.elements(".erase")[1].click()
    page.wait(lambda: len(page.elements(".choose")) == 1 and page.text(".assistant .body") == "")
    page.element("#notice button").click()
    page.wait(
        lambda: len(page.elements(".choose")) == 2 and page.text(".assistant .body") == "first question"
    )
    say(page, "word " * 100)
    page.wait_text(".assistant .body", "word")
    # While its answer streams, and in one script: the list is rebuilt whenever the conversation is saved.
    page.run("document.querySelector('.erase').click()")
    page.wait_text("#send", "Send")
    assert [one.text for one in page.elements(".choose")] == ["second question"]


def test_a_question_can_be_edited_and_asked_again(page: Browser) -> None:
    ask(page, "one")
    page.element(".user footer button").click()
    assert page.element("#composer").get_attribute("value") == "one" and not page.elements(".message")
    page.element("#composer").send_keys(" more" + Keys.ENTER)
    page.wait_text(".assistant .note", "finished")
    assert page.text(".assistant .body") == "one more"
    page.elements(".assistant footer button")[-1].click()
    page.wait_text(".assistant .note", "finished")
    assert len(page.elements(".message")) == 2


def test_a_draft_comes_back_after_an_edited_question_is_sent(page: Browser) -> None:
    ask(page, "one")
    page.run("composer.value = 'a draft'")
    page.element(".user footer button").click()
    assert page.element("#composer").get_attribute("value") == "one"
    page.element("#composer").send_keys(" more" + Keys.ENTER)
    page.wait_text(".assistant .note", "finished")
    assert page.text(".user .body") == "one more"
    assert page.element("#composer").get_attribute("value") == "a draft"


@pytest.fixture
def second_tab(page: Browser, parrot: ServerProcess) -> Iterator[Callable[[int], None]]:
    """Another tab with the page. The function shows the first tab (0) or the second (1)."""
    page.driver.switch_to.new_window("tab")
    page.open(parrot.url)
    tabs = page.driver.window_handles
    yield lambda number: page.driver.switch_to.window(tabs[number])
    page.driver.switch_to.window(tabs[1])
    assert page.errors() == []
    page.driver.close()
    page.driver.switch_to.window(tabs[0])


def test_a_tab_shows_what_another_one_adds_to_the_conversation(
    page: Browser, second_tab: Callable[[int], None], parrot: ServerProcess
) -> None:
    second_tab(0)
    ask(page, "from the first")
    second_tab(1)
    page.open(parrot.url)
    ask(page, "from the second")
    second_tab(0)
    page.wait(lambda: len(page.elements(".assistant footer")) == 2)
    ask(page, "from the first again")
    page.open(parrot.url)
    asked = [one.text for one in page.elements(".user .body")]
    assert asked == ["from the first", "from the second", "from the first again"]
    assert len(page.elements(".choose")) == 1


def test_two_tabs_that_answer_at_once_keep_both_answers(
    page: Browser, second_tab: Callable[[int], None], parrot: ServerProcess
) -> None:
    second_tab(0)
    ask(page, "start")
    second_tab(1)
    page.open(parrot.url)
    say(page, "second " * 60)
    page.wait_text(".assistant .body", "second")
    second_tab(0)
    page.wait(lambda: len(page.elements(".user")) == 2)
    say(page, "first " * 60)
    for number in (0, 1):
        second_tab(number)
        page.wait_text("#send", "Send")
    second_tab(0)
    page.open(parrot.url)
    kept = page.run(
        "return Object.entries(localStorage).filter(([name]) => name.startsWith('levserve.chat.')).map(([, text]) => text)"
    )
    answers = [
        message["content"]
        for text in kept
        for message in json.loads(text)["messages"]
        if message["role"] == "assistant"
    ]
    assert {("second " * 60).strip(), ("first " * 60).strip()} <= set(answers)


def test_an_answer_of_thoughts_alone_stays(browser: Browser) -> None:
    with ServerProcess("--served-model-name", "thinking-parrot") as process:
        browser.open(process.wait_ready().url)
        ask(browser, "<think>hm</think>")
        assert len(browser.elements(".assistant")) == 1
        browser.element(".assistant .thoughts summary").click()
        assert browser.text(".assistant .thoughts-text") == "hm"
        ask(browser, "yes")  # an answer without text is not sent back
        assert browser.text(".assistant .body") == "yes"
        browser.open(process.url)
        assert len(browser.elements(".assistant")) == 2
        browser.run("localStorage.clear()")
        browser.driver.get("about:blank")  # the page would ask on for the metrics of a server that has gone
        assert browser.errors() == []


def test_everything_can_be_done_with_the_keyboard(page: Browser) -> None:
    tab_to(page, "#composer")
    press(page, *"hello", Keys.ENTER)
    page.wait_text(".assistant .note", "finished")
    tab_to(page, "[aria-pressed]", back=True)
    press(page, Keys.SPACE)
    tab_to(page, ".token", back=True)
    assert page.text("#tip").startswith("h 60.7 %")
    press(page, Keys.ARROW_RIGHT)
    assert page.text("#tip").startswith("e 60.7 %") and "22.3 %" in page.text("#tip")
    page.run("document.getElementById('tab-chat').focus()")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.run("return document.activeElement.id") == "tab-scoring"
    tab_to(page, "#score")
    press(page, Keys.ENTER)
    page.wait_text("#scoring-note", "tokens scored")


def test_every_control_has_a_name(page: Browser) -> None:
    ask(page, "hello")
    page.run("for (const hidden of document.querySelectorAll('[hidden]')) hidden.hidden = false")
    page.run("for (const dialog of document.querySelectorAll('dialog')) dialog.show()")
    controls = page.elements("button, input, select, textarea, dialog, [role=log], nav, aside, article")
    shown = [one for one in controls if one.is_displayed()]
    assert len(shown) > 50
    assert [one.get_attribute("outerHTML") for one in shown if not one.accessible_name] == []


def test_sampling_fields_are_sent_by_their_names(page: Browser, parrot: ServerProcess) -> None:
    page.run(
        "for (const [id, value] of Object.entries(arguments[0])) {"
        " const field = document.getElementById(id); field.value = value;"
        " field.dispatchEvent(new Event('input', { bubbles: true })); }",
        {
            "temperature": "0",
            "top_p-slider": "0.5",
            "top_k": "7",
            "min_p": "0.1",
            "max_tokens": "5",
            "seed": "3",
            "presence_penalty": "-1",
            "frequency_penalty": "1",
            "repetition_penalty": "1.1",
            "stop": "x\nyz",
            "system": "Be brief.",
        },
    )
    ask(page, "hello there")
    assert page.text(".assistant .body") == "hello" and "reached max_tokens" in page.text(".assistant .note")
    page.element("#code-open").click()
    curl = page.text("#curl-code")
    page.element("#code-close").click()
    body = json.loads(curl.partition("-d '")[2].rpartition("'")[0])
    assert body == {
        "model": "toy",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}],
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 5, "presence_penalty": -1,
        "frequency_penalty": 1, "repetition_penalty": 1.1, "seed": 3, "stop": ["x", "yz"],
        "logprobs": True, "top_logprobs": 5, "stream": True,
    }  # fmt: skip
    page.open(parrot.url)
    assert page.element("#top_k").get_attribute("value") == "7"  # kept for the next visit
    page.element("#tab-completion").click()
    assert page.element("#top_k").is_displayed() and not page.element("#system").is_displayed()
    page.element("#sampling-reset").click()
    assert page.element("#top_k").get_attribute("value") == ""


def write_into(page: Browser, name: str, text: str) -> None:
    page.run(
        "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
        " for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }));",
        name,
        text,
    )


def test_a_schema_is_sent_and_one_that_is_not_json_keeps_the_question_back(page: Browser) -> None:
    write_into(page, "schema", '{"type": ')
    assert "not JSON" in page.text("#schema-error")
    say(page, "hello")
    assert page.elements(".message") == [] and page.run("return document.activeElement.id") == "schema"
    write_into(page, "schema", '{"const": "hello"}')
    assert not page.element("#schema-error").is_displayed()
    ask(page, "hello")
    page.element("#code-open").click()
    assert '"schema": { "const": "hello" }' in " ".join(page.text("#curl-code").split())
    page.element("#code-close").click()


def test_calls_of_tools_are_shown_as_text_and_go_on_with_their_results(page: Browser) -> None:
    write_into(
        page,
        "tools",
        '[{"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}]',
    )
    hostile = "<img src=x onerror=window.pwned=1>"
    ask(page, f'<tool_call>{{"name": "look", "arguments": {{"at": "{hostile}"}}}}</tool_call>')
    assert page.text(".call-head") == "Call of look"
    assert hostile in page.text(".call pre") and "calls tools" in page.text(".assistant .note")
    page.element(".results textarea").send_keys("a wall")
    page.element(".results button").click()
    page.wait(lambda: len(page.elements(".assistant footer")) == 2)
    assert page.text(".message.tool pre") == "a wall" and "a wall" in page.text(".assistant .body")
    assert page.elements(".results") == []
    assert page.run("return window.pwned") is None


def test_the_code_on_the_screen_runs(page: Browser) -> None:
    page.run("composer.value = arguments[0]", QUOTES)
    page.run("document.getElementById('prompt').value = arguments[0]", QUOTES)
    outputs, programs = [], []
    for tab in ("chat", "completion", "scoring"):
        page.element(f"#tab-{tab}").click()
        page.element("#code-open").click()
        codes = "return ['curl', 'python'].map((name) => document.getElementById(`${name}-code`).textContent)"
        curl, python = page.run(codes)
        page.element("#code-close").click()
        outputs.append(run_curl(curl))
        programs.append(python)
    # In one process, because OpenAI's package takes a second to import.
    joined = "print(end='\\0', flush=True)\n".join(programs)
    done = subprocess.run([sys.executable, "-c", joined], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    chat, text, scores = outputs
    chat_python, text_python, scores_python = done.stdout.split("\0")
    for events, shown in ((chat, chat_python), (text, text_python)):
        chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        pieces = [
            chunk["choices"][0].get("text") or chunk["choices"][0].get("delta", {}).get("content")
            for chunk in chunks
        ]
        assert "".join(piece or "" for piece in pieces) == QUOTES == shown.removesuffix("\n")
    assert json.loads(scores) == json.loads(scores_python) and len(json.loads(scores)["ll"]) == 3


def test_completions_and_scores_show_their_tokens(page: Browser, parrot: ServerProcess) -> None:
    page.element("#tab-completion").click()
    page.element("#complete").click()
    page.wait_text("#completion-note", "tok/s")
    assert page.text("#completion") == "Once upon a time"
    ActionChains(page.driver, duration=0).move_to_element(page.elements("#completion .token")[2]).perform()
    page.wait_text("#tip", "c 60.7 %, log -0.500")
    page.element("#append").click()
    assert page.element("#prompt").get_attribute("value") == "Once upon a time" * 2
    page.element("#tab-scoring").click()
    page.element("#score").click()
    page.wait_text("#scoring-note", "tokens scored")
    rows = [row.text for row in page.elements("#scores tr")]
    assert len(rows) == 3 and all(row.startswith(" ") for row in rows)
    page.open(parrot.url + "/#scoring")
    assert page.element("#panel-scoring").is_displayed() and not page.element("#panel-chat").is_displayed()


def test_the_server_is_watched_and_nothing_else_is_asked(page: Browser, parrot: ServerProcess) -> None:
    page.wait_text("#metric-running", "0")
    page.wait_text("#metric-kv", "0 %")
    asked = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(asked) > 15 and all(name.startswith(parrot.url) for name in asked)


@pytest.fixture
def docs(page: Browser) -> Browser:
    """The description of the API, found by the link on the page."""
    page.element("header a[href='/docs']").click()
    page.wait(lambda: page.run("return document.querySelector('#operations[aria-busy=false]') !== null"))
    return page


def test_every_endpoint_of_the_description_is_listed_and_nothing_else_is_asked(
    docs: Browser, parrot: ServerProcess
) -> None:
    with urllib.request.urlopen(parrot.url + "/openapi.json", timeout=10) as response:
        paths = json.load(response)["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    titles = "return [...document.querySelectorAll('.operation > summary')].map((one) => [...one.children].map((part) => part.innerText))"
    shown = docs.run(titles)
    assert {(method, path) for method, path, _ in shown} == described and len(shown) == len(described)
    assert ("POST", "/v1/chat/completions") in described and all(what for _, _, what in shown)
    asked = docs.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(asked) > 2 and all(name.startswith(parrot.url) for name in asked)


def unfold(docs: Browser, method: str, path: str) -> WebElement:
    """The inside of an operation, opened; the page fills it a moment after it can be seen."""
    script = (
        "return [...document.querySelectorAll('.operation')].find((one) =>"
        " one.querySelector('.method').innerText === arguments[0]"
        " && one.querySelector('code').innerText === arguments[1])"
    )
    operation: WebElement = docs.run(script, method, path)
    operation.find_element("css selector", "summary").click()
    inside = operation.find_element("css selector", "summary + div")
    docs.wait(lambda: inside.is_displayed() and bool(inside.text))
    return inside


def test_an_endpoint_unfolds_to_its_fields_and_can_be_tried(docs: Browser) -> None:
    script = "return [...document.querySelectorAll('.operation')].find((one) => one.querySelector('code').innerText === arguments[0])"
    chat = docs.run(script, "/v1/chat/completions")
    inside = chat.find_element("css selector", "summary + div")
    assert not inside.is_displayed()
    unfold(docs, "POST", "/v1/chat/completions")
    fields, *_ = inside.find_elements("css selector", "details")
    fields.find_element("css selector", "summary").click()
    names = [one.text for one in fields.find_elements("css selector", "td:first-child")]
    assert {"messages", "max_tokens", "temperature"} <= set(names)
    body = inside.find_element("css selector", "textarea")
    example = json.loads(str(body.get_attribute("value")))
    asked = example | {"messages": [{"role": "user", "content": QUOTES}], "max_tokens": 200, "stream": False}
    docs.run("arguments[0].value = arguments[1]", body, json.dumps(asked))
    inside.find_element("css selector", "button").click()
    output = inside.find_element("css selector", "[role=status]")
    docs.wait(lambda: '"finish_reason"' in output.text)
    status, _, answer = output.text.partition("\n")
    assert status == "200 OK" and json.loads(answer)["choices"][0]["message"]["content"] == QUOTES


def test_the_commands_for_a_file_upload_and_delete_it(docs: Browser, tmp_path: Path) -> None:
    file = tmp_path / "it's; mine.jsonl"
    file.write_text('{"custom_id": "a"}\n')
    upload = unfold(docs, "POST", "/v1/files")
    assert "-F 'file=@FILE' -F 'purpose=batch'" in upload.text
    upload.find_element("css selector", "input[type=file]").send_keys(str(file))
    upload.find_element("css selector", "button").click()
    output = upload.find_element("css selector", "[role=status]")
    docs.wait(lambda: '"id"' in output.text)
    sent = json.loads(output.text.partition("\n")[2])
    made = json.loads(run_curl(f"cd {tmp_path} && " + upload.find_element("css selector", "pre").text))
    assert [one["filename"] for one in (sent, made)] == [file.name] * 2
    for one in (sent, made):
        delete = unfold(docs, "DELETE", "/v1/files/{id}")
        delete.find_element("css selector", "input").clear()
        delete.find_element("css selector", "input").send_keys(one["id"])
        assert json.loads(run_curl(delete.find_element("css selector", "pre").text))["deleted"]
        docs.run("arguments[0].parentElement.open = false", delete)


def test_light_dark_and_a_phone(page: Browser) -> None:
    def ground() -> str:
        return str(page.run("return getComputedStyle(document.documentElement).backgroundColor"))

    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    system = ground()
    page.element("#theme").click()
    light = ground()
    page.element("#theme").click()
    assert (page.text("#theme"), ground()) == ("Theme: dark", system) and light != system
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert page.run("return document.documentElement.scrollWidth <= 390")
    assert not page.element("#temperature").is_displayed()
    page.element("#settings-toggle").click()
    assert page.element("#temperature").is_displayed()
    press(page, Keys.ESCAPE)
    assert not page.element("#temperature").is_displayed()
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_key_is_asked_for_until_it_is_right_and_forgotten_with_the_tab(
    browser: Browser, guarded: ServerProcess
) -> None:
    browser.driver.get(guarded.url)
    for key, message in (("wrong", "This server asks for an API key."), (KEY, "Incorrect API key provided")):
        browser.wait_text("#key-message", message)
        browser.element("#key-input").send_keys(key + Keys.ENTER)
    browser.wait(lambda: browser.text("#model") == "toy")
    assert not browser.element("#key-dialog").is_displayed()
    browser.wait_text("#metric-running", "0")
    assert browser.run("return JSON.stringify(localStorage)").count(KEY) == 0
    browser.element("#code-open").click()
    curl = browser.text("#curl-code")
    browser.element("#code-close").click()
    assert KEY not in curl
    assert "data: [DONE]" in run_curl(curl, LEVSERVE_API_KEY=KEY)
    assert [error for error in browser.errors() if "401" not in error] == []


def test_a_key_that_is_given_late_connects_the_page(browser: Browser, guarded: ServerProcess) -> None:
    browser.driver.get(f"{guarded.url}/static/icon.svg")
    browser.run("sessionStorage.clear(); localStorage.clear()")
    browser.driver.get(guarded.url)
    browser.wait_text("#key-message", "This server asks for an API key.")
    browser.element("#key-cancel").click()
    browser.wait_text("#status", "API key")
    browser.wait(lambda: browser.text("#metrics-error") != "")
    say(browser, "t17")
    browser.wait(browser.element("#key-dialog").is_displayed)
    browser.element("#key-input").send_keys(KEY + Keys.ENTER)
    browser.wait(lambda: browser.text("#model") == "toy")
    browser.wait(lambda: browser.text("#metrics-error") == "")
    browser.element("#composer").send_keys(Keys.ENTER)  # the question has waited there
    browser.wait_text(".assistant .note", "out")
    assert browser.text(".user .body") == "t17"
    assert not browser.element("#status").is_displayed()
    assert [error for error in browser.errors() if "401" not in error] == []


@pytest.fixture
def toy(browser: Browser, guarded: ServerProcess) -> Browser:
    """The page with the key, sampling greedily: an answer is t10 t11 t12 ..."""
    browser.driver.get(f"{guarded.url}/static/icon.svg")
    browser.run("sessionStorage.setItem('levserve.key', arguments[0])", KEY)
    browser.run("localStorage.clear(); localStorage.setItem('levserve.sampling', '{\"temperature\": 0}')")
    browser.open(guarded.url)
    browser.errors()
    return browser


def test_stop_hangs_up_and_keeps_what_came(toy: Browser, guarded: ServerProcess) -> None:
    guarded.skip_events()
    say(toy, "t6")  # one token, then none
    submitted = guarded.wait_event("submit")
    toy.wait_text(".assistant .body", "t10")
    press(toy, Keys.ESCAPE)
    assert guarded.wait_event("cancel") == submitted
    toy.wait_text(".assistant .note", "stopped by you")
    assert toy.text(".assistant .body") == "t10"
    toy.element("#new-chat").click()
    say(toy, "t4")  # no token at all; stopped with the button
    guarded.wait_event("submit")
    toy.element("#send").click()
    guarded.wait_event("cancel")
    toy.wait_text("#send", "Send")
    assert toy.elements(".user") and not toy.elements(".assistant")
    assert toy.errors() == []


def test_an_error_is_shown_and_can_be_tried_again(toy: Browser) -> None:
    toy.element("#temperature").send_keys("9")
    say(toy, "t17")
    toy.wait_text("#messages .error", "'temperature'")
    assert toy.element("#messages .error").get_attribute("role") == "alert"
    toy.element("#temperature").clear()
    toy.element("#temperature").send_keys("0")
    toy.element("#messages .error button").click()
    toy.wait_text(".assistant .note", "out")
    assert toy.text(".assistant .body").startswith("t10 t11") and not toy.elements("#messages .error")
    assert all("400" in error for error in toy.errors())  # a browser logs every refused request
    toy.element("#new-chat").click()
    say(toy, "t5")  # the device dies
    toy.wait_text("#messages .error", "The device failed while the request was running.")
    toy.wait_text("#metrics-error", "The server cannot be reached.")
    toy.errors()
