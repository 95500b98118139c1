"""Conversations: rendered exactly by the model's template; no message can act as a control token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from levserve.errors import BadRequest, StartupError
from levserve.text.chat import check_template, hide, render_chat
from levserve.text.tokenizer import Tokenizer, load_tokenizer
from levserve.text.vocabulary import Vocabulary

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "smollm2-135m.json").read_text(encoding="utf-8"))["cases"]
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
START, END = 1, 2
WORDS = st.lists(
    st.sampled_from(["a", " ", "\n", "<", "|", "im_end", ">", "東", "user", "assistant\n"]), max_size=12
).map("".join)
CONTROLS = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<filename>"])

TemplateMaker = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def tokenizer(bundled_gguf: Path) -> Tokenizer:
    return load_tokenizer(bundled_gguf)


@pytest.fixture(scope="module")
def with_template(tokenizer: Tokenizer) -> TemplateMaker:
    """The bundled vocabulary with another template."""
    return lambda template: Tokenizer(
        Vocabulary(tokenizer.backend, bos_token="<|endoftext|>", chat_template=template)
    )


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.decode(render_chat(tokenizer, messages, **options), skip_special_tokens=False)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["kind"] == "chat"], ids=lambda case: case["user"][:24]
)
def test_golden_conversation_gives_the_reference_tokens(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert render_chat(tokenizer, user(case["user"])) == case["prompt_tokens"]


def test_conversation_of_several_turns_keeps_its_order(tokenizer: Tokenizer) -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    assert rendered(tokenizer, messages) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    assert (
        rendered(tokenizer, user("Hi"), add_generation_prompt=False)
        == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n"
    )


def test_final_message_can_be_left_open(tokenizer: Tokenizer) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "The answer is"}]
    text = rendered(tokenizer, messages, continue_final_message=True)
    assert text == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe answer is"


def test_bos_of_the_template_is_the_only_one(tokenizer: Tokenizer) -> None:
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.post_processor = TemplateProcessing(
        single=["<|endoftext|>", "$A"], special_tokens=[("<|endoftext|>", 0)]
    )
    template = "{{ bos_token }}{{ messages[0].content }}"
    adds_bos = Tokenizer(Vocabulary(backend, bos_token="<|endoftext|>", chat_template=template))
    assert adds_bos.encode("Hi")[0] == 0
    assert render_chat(adds_bos, user("Hi")) == [0, *tokenizer.encode("Hi")]


def test_developer_counts_as_system_where_the_template_does_not_know_it(with_template: TemplateMaker) -> None:
    messages = [{"role": "developer", "content": ""}]
    assert rendered(with_template("{{ messages[0].role }}"), messages) == "system"
    assert rendered(with_template("{# developer #}{{ messages[0].role }}"), messages) == "developer"


def test_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    assert render_chat(tokenizer, user(parts)) == render_chat(tokenizer, user("What is this?"))


def test_assistant_message_without_content_is_empty(tokenizer: Tokenizer) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert render_chat(tokenizer, messages) == render_chat(
        tokenizer, [*user("Hi"), *[{"role": "assistant", "content": ""}] * 2]
    )


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (None, "messages[0].content"),
        (3, "messages[0].content"),
        ({"type": "text", "text": "x"}, "messages[0].content"),
        ([{"type": "text", "text": "x"}, {"type": "image_url"}], "messages[0].content[1].type"),
        (["x"], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ("cut emoji \ud83d", "messages"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(tokenizer: Tokenizer, content: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render_chat(tokenizer, user(content))
    assert caught.value.param == param


def test_conversation_without_messages_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest) as caught:
        render_chat(tokenizer, [])
    assert caught.value.param == "messages"


@given(content=WORDS.filter(lambda text: "<|im_end|>" not in text))
def test_message_without_special_strings_gives_the_tokens_of_the_plain_rendering(
    tokenizer: Tokenizer, content: str
) -> None:
    text = f"{SYSTEM}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(tokenizer, user(content)) == tokenizer.encode(text, add_special_tokens=False)


@given(content=st.lists(WORDS | CONTROLS, max_size=8).map("".join))
def test_special_strings_in_a_message_are_plain_text(tokenizer: Tokenizer, content: str) -> None:
    harmless, tokens = render_chat(tokenizer, user("")), render_chat(tokenizer, user(content))
    for special in range(17):
        assert tokens.count(special) == harmless.count(special)
    assert tokens[-6:] == harmless[-6:]
    text = f"{SYSTEM}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_special_string_is_encoded_as_if_it_had_never_been_special(tokenizer: Tokenizer) -> None:
    message = tokenizer.encode_plain("user\nsay <|im_end|> now")
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
    assert render_chat(tokenizer, user("say <|im_end|> now")) == [
        *tokenizer.encode(SYSTEM),
        START,
        *message,
        *tail,
    ]


def test_special_strings_pass_through_the_filters_of_a_template(with_template: TemplateMaker) -> None:
    trims = with_template("<|im_start|>{{ messages[0].content | trim }}<|im_end|>")
    tokens = render_chat(trims, user("  <|im_end|> x\n<|im_end|> \n"))
    assert tokens == [START, *trims.encode_plain("<|im_end|> x\n<|im_end|>"), END]


def test_template_without_special_tokens_of_its_own_still_hides_those_of_a_message(
    with_template: TemplateMaker,
) -> None:
    plain = with_template("{{ messages[0].content }}")
    assert render_chat(plain, user("a<|im_end|>")) == plain.encode_plain("a<|im_end|>")


def test_special_strings_are_hidden_in_every_field_of_a_message_and_in_arguments(
    with_template: TemplateMaker,
) -> None:
    fields = with_template("{{ messages[0].calls[0].name }} {{ tools[0].name }}<|im_end|>")
    messages = [{**user("")[0], "calls": [{"name": "<|im_end|>"}]}]
    tokens = render_chat(fields, messages, template_kwargs={"tools": [{"name": "<|im_start|>"}]})
    assert fields.decode(tokens, skip_special_tokens=False) == "<|im_end|> <|im_start|><|im_end|>"
    assert (tokens.count(START), tokens.count(END)) == (0, 1)


@pytest.mark.parametrize(
    ("specials", "text", "hidden"),
    [
        (("<end>", "<s>"), "a<s><end>b<s", "a(1)(0)b<s"),
        (("<<s>>", "<s>"), "<<s>> <s>>", "(0) (1)>"),  # the longer one first
        (("<end>", "0", "1"), "<end>01", "(0)(1)(2)"),  # the number that hides "<end>" is not hidden itself
        (("abc", "cd"), "abcd", "(0)d"),
        (("[a.b]",), "[a.b] [axb]", "(0) [axb]"),
        ((), "<s>", "<s>"),
    ],
)
def test_special_strings_are_hidden_by_their_numbers(
    specials: tuple[str, ...], text: str, hidden: str
) -> None:
    shown = hidden.replace("(", "\ud800").replace(")", "\udfff")
    given = {"list": [text, 3, None, {text: text}]}
    assert hide(given, specials) == {"list": [shown, 3, None, {shown: shown}]}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('Roles must alternate: ' + messages[0].content) }}",
            "Roles must alternate: <|im_end|>",
        ),
        ("{{ missing.field }}", "missing"),
        ("{{ messages[0].content + 3 }}", "str"),
    ],
)
def test_template_that_raises_is_a_bad_request_with_its_message(
    with_template: TemplateMaker, template: str, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        render_chat(with_template(template), user("<|im_end|>"))
    assert caught.value.param == "messages"
    assert message in caught.value.message


def test_template_cannot_leave_its_sandbox(with_template: TemplateMaker) -> None:
    with pytest.raises(BadRequest, match="unsafe"):
        render_chat(with_template("{{ messages.__class__.__mro__ }}"), user("Hi"))


def test_arguments_reach_the_template(with_template: TemplateMaker) -> None:
    assert rendered(with_template("{{ mood }}"), user("Hi"), template_kwargs={"mood": "good"}) == "good"


@pytest.mark.parametrize("name", ["messages", "chat_template", "add_generation_prompt"])
def test_argument_that_is_the_servers_own_is_refused(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        render_chat(tokenizer, user("Hi"), template_kwargs={name: ""})
    assert caught.value.param == "chat_template_kwargs"


def test_broken_template_stops_the_start_and_names_the_line(with_template: TemplateMaker) -> None:
    with pytest.raises(StartupError, match="line 2"):
        check_template(with_template("\n{% if %}"))


def test_template_that_refuses_the_trial_conversation_is_not_broken(with_template: TemplateMaker) -> None:
    check_template(with_template("{{ raise_exception('only tools') }}"))


def test_model_with_llama3s_tokens_and_no_template_gets_llama3s(tokenizer: Tokenizer) -> None:
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    bare = Tokenizer(Vocabulary(backend, bos_token="<|endoftext|>"))
    assert rendered(bare, [{"role": "system", "content": " Be brief. "}, *user("Hi")]) == (
        "<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_model_without_a_template_refuses_messages_and_says_what_to_do() -> None:
    toy = load_tokenizer(GOLDEN / "llama")
    check_template(toy)
    with pytest.raises(
        BadRequest, match="has no chat template.*/v1/completions.*--chat-template FILE"
    ) as caught:
        render_chat(toy, user("t17 t18"))
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        "messages",
        "no_chat_template",
    )


def test_model_without_a_template_can_be_given_one() -> None:
    toy = load_tokenizer(GOLDEN / "llama", chat_template="{{ bos_token }} {{ messages[0].content }}")
    assert render_chat(toy, user("t17 t18")) == [1, 17, 18]
