"""The bundled model with a template that makes it think: a budget cuts thoughts, answers obey a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.servers import Server, running_server

MODEL = "smollm2-135m"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
HELD = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
BUDGET = 12


@pytest.fixture(scope="module")
def server(bundled_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE)
    flags = ("--model", str(bundled_gguf), "--served-model-name", MODEL, "--chat-template", str(template))
    with running_server(*flags, "--max-running", "8", "--prefill-chunk", "128") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name the capital of France and its people, as JSON."}],
        max_tokens=120,
        seed=7,
        **fields,
    )


def test_the_log_tells_how_it_thinks(server: Server) -> None:
    found = "reasoning: think (<think> ... </think>, switched by enable_thinking)"
    assert any(found in line for line in server.lines)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_held_answer_follows_thoughts_that_a_budget_cut(client: openai.OpenAI, temperature: float) -> None:
    fields: dict[str, Any] = {
        "temperature": temperature,
        "response_format": HELD,
        "extra_body": {"thinking_token_budget": BUDGET},
    }
    answer = ask(client, **fields)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content).keys() == {"city", "people"}
    assert choice.message.reasoning_content and "think>" not in choice.message.reasoning_content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= BUDGET + 8  # with the end mark
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True, **fields) if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == choice.message.reasoning_content


def test_a_budget_alone_leaves_room_for_an_answer(client: openai.OpenAI) -> None:
    message = ask(client, temperature=0, extra_body={"thinking_token_budget": 3}).choices[0].message
    assert message.reasoning_content and message.content


def test_it_answers_without_thoughts_if_asked_to(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, reasoning_effort="none", response_format=HELD)
    assert "reasoning_content" not in answer.choices[0].message.model_fields_set
    assert json.loads(answer.choices[0].message.content).keys() == {"city", "people"}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_anthropics_sdk_gets_thoughts_in_blocks_of_their_own(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1100,
        "messages": [{"role": "user", "content": "Name the capital of France and its people, as JSON."}],
        "output_config": {"format": {"type": "json_schema", "schema": CITY}},
        "extra_body": {"thinking": {"type": "enabled", "budget_tokens": BUDGET}, "temperature": 0},
    }
    import anthropic  # takes seconds

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    thought, text = whole.content
    assert (thought.type, text.type, whole.stop_reason) == ("thinking", "text", "end_turn")
    assert thought.thinking and json.loads(text.text).keys() == {"city", "people"}
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (streamed.content[0].thinking, streamed.content[1].text) == (thought.thinking, text.text)
