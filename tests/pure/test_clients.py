"""OpenAI's asynchronous Python client, its Node client, and Anthropic's client, as their users call them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.fake_server import ServerProcess
from tests.node import package_folder

if TYPE_CHECKING:
    import anthropic  # takes seconds, so the tests that need it import it

KEY = "sk-test-0123456789"
MESSAGES: Any = [{"role": "user", "content": "t17 t18"}]

NODE_PROGRAM = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.KEY, maxRetries: 0 });
const asked = { model: "toy", messages: [{ role: "user", content: "t17 t18" }], temperature: 0, max_completion_tokens: 3 };

const whole = await client.chat.completions.create(asked);
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const text = await client.completions.create({ model: "toy", prompt: "t17", temperature: 0, max_tokens: 1 });
const models = (await client.models.list()).data.map((model) => model.id);
let failure = null;
try {
  await client.chat.completions.create({ ...asked, model: "gpt-9" });
} catch (error) {
  failure = { kind: error.constructor.name, status: error.status, code: error.code, param: error.param, hasId: Boolean(error.requestID) };
}
const stopped = await client.chat.completions.create({ ...asked, messages: [{ role: "user", content: "t6" }], stream: true });
for await (const _ of stopped) break;  // leaves in the middle, which hangs up

console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed, usage, text: text.choices[0].text, models, failure }));
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-running", "4", "--api-key", KEY) as process:
        yield process.wait_ready()


async def talk(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

        async def ask(number: int) -> str:
            answer = await client.completions.create(
                model="toy", prompt=f"t{number}", temperature=0, max_tokens=2
            )
            return answer.choices[0].text

        assert await asyncio.gather(*(ask(number) for number in range(20, 28))) == [
            f" t{n + 1} t{n + 2}" for n in range(20, 28)
        ]
        stream = await client.chat.completions.create(
            model="toy", messages=MESSAGES, temperature=0, max_tokens=3, stream=True
        )
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["", "t10", " t11", " t12", None]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="toy", messages=MESSAGES, temperature=3)
        assert caught.value.param == "temperature"
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


def test_the_asynchronous_client_asks_streams_and_reads_errors(server: ServerProcess) -> None:
    asyncio.run(talk(server.url))


@pytest.mark.node
def test_the_node_client_asks_streams_and_reads_errors(server: ServerProcess) -> None:
    server.skip_events()
    environ = os.environ | {"BASE_URL": f"{server.url}/v1", "KEY": KEY}
    command = ["node", "--input-type=module", "-e", NODE_PROGRAM]
    done = subprocess.run(
        command, cwd=package_folder(), env=environ, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["whole"], told["streamed"], told["text"], told["models"]) == (
        "t10 t11 t12",
        "t10 t11 t12",
        " t18",
        ["toy"],
    )
    assert told["usage"]["completion_tokens"] == 3
    failure = {
        "kind": "NotFoundError",
        "status": 404,
        "code": "model_not_found",
        "param": "model",
        "hasId": True,
    }
    assert told["failure"] == failure
    server.wait_event("cancel")


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


GREEDY: dict[str, Any] = {"model": "toy", "max_tokens": 3, "extra_body": {"temperature": 0}}


def test_anthropics_client_gets_a_message_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    import anthropic

    whole = claude.messages.create(messages=MESSAGES, **GREEDY)
    assert whole.content == [anthropic.types.TextBlock(type="text", text="t10 t11 t12")]
    assert (whole.stop_reason, whole.usage.input_tokens, whole.usage.output_tokens) == ("max_tokens", 3, 3)
    with claude.messages.stream(messages=MESSAGES, **GREEDY) as stream:
        assert list(stream.text_stream) == ["t10", " t11", " t12"]
        streamed = stream.get_final_message()
    assert streamed.model_dump(exclude={"id", "content"}) == whole.model_dump(exclude={"id", "content"})
    assert streamed.content[0].text == "t10 t11 t12"  # type: ignore[union-attr]
    stopped = claude.beta.messages.create(messages=MESSAGES, stop_sequences=["t11"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "t11")
    assert claude.messages.count_tokens(model="toy", messages=MESSAGES).input_tokens == 3


def test_anthropics_client_reads_errors(server: ServerProcess, claude: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(messages=MESSAGES, model="claude-unknown", max_tokens=3)
    assert (missing.value.type, bool(missing.value.request_id)) == ("not_found_error", True)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        claude.messages.create(messages=MESSAGES, model="toy", max_tokens=0)
    assert wrong.value.type == "invalid_request_error" and "max_tokens" in wrong.value.message
    with anthropic.Anthropic(base_url=server.url, auth_token="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.count_tokens(messages=MESSAGES, model="toy")
    with claude.messages.stream(
        messages=[{"role": "user", "content": "t6"}], timeout=None, **GREEDY
    ) as stream:
        next(iter(stream.text_stream))  # leaving the block in the middle hangs up
    server.wait_event("cancel")
