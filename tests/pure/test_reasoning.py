"""Models that think: what their templates reveal, and how thoughts are separated from answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from levserve.generation import Choice, join_parts
from levserve.schedule.request import TokenBatch
from levserve.text.chat import render_chat
from levserve.text.parts import Content, Part, Thought
from levserve.text.reasoning import FAMILIES, Begun, Reasoning, find_reasoning
from levserve.text.stops import StopStrings
from levserve.text.thought_reader import ThoughtReader
from levserve.text.tokenizer import Tokenizer
from levserve.text.vocabulary import Vocabulary

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}THOUGHT{{ message.reasoning_content }}END{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
TEMPLATES = {
    "qwen3": TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    "qwen3.5": TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}",
    "r1": TURNS + "{{ '<think>\n' }}{% endif %}",
    "deepseek-v3.1": TURNS + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
    "mistral": "{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}"
    "{# thoughts stand between [THINK] and [/THINK] #}",
    "gpt-oss": "{% for message in messages %}<|start|>{{ message.role }}<|message|>Reasoning: "
    "{{ reasoning_effort }} {{ message.content }}<|end|>{% endfor %}{# <|channel|>analysis #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "gemma": "{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}",
    "none": TURNS + "{% endif %}",
}
SPECIALS = [
    "<|im_end|>",
    "[THINK]",
    "[/THINK]",
    "<|channel>",
    "<channel|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
]


def make_tokenizer(template: str) -> Tokenizer:
    """A tokenizer with every byte, and the marks of some families as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    end = backend.token_to_id("<|im_end|>")
    return Tokenizer(Vocabulary(backend, eos_ids=frozenset((end,)), chat_template=template))


def find(name: str) -> Reasoning:
    found = find_reasoning(make_tokenizer(TEMPLATES[name]))
    assert found is not None
    return found


def look(name: str, **kwargs: Any) -> Begun:
    tokenizer = make_tokenizer(TEMPLATES[name])
    prompt = render_chat(tokenizer, [{"role": "user", "content": "what is <think>?"}], template_kwargs=kwargs)
    return find(name).look_at(prompt)


@pytest.mark.parametrize(
    ("name", "family", "switch", "reads_effort"),
    [
        ("qwen3", "think", "enable_thinking", False),
        ("qwen3.5", "think", "enable_thinking", False),
        ("r1", "think", None, False),
        ("deepseek-v3.1", "think", "thinking", False),
        ("mistral", "mistral", None, False),
        ("gpt-oss", "harmony", None, True),
        ("gemma", "gemma", "enable_thinking", False),
    ],
)
def test_the_template_tells_how_a_model_thinks(
    name: str, family: str, switch: str | None, reads_effort: bool
) -> None:
    found = find(name)
    assert (found.family, found.switch, found.reads_effort) == (family, switch, reads_effort)


def test_a_model_whose_template_has_no_marks_does_not_think_unless_it_is_said_to() -> None:
    tokenizer = make_tokenizer(TEMPLATES["none"])
    assert find_reasoning(tokenizer) is None
    named = find_reasoning(tokenizer, "mistral")
    assert named is not None and named.marks.begin == "[THINK]"
    assert find_reasoning(make_tokenizer(TEMPLATES["r1"]), "none") is None


@pytest.mark.parametrize(
    ("name", "kwargs", "begun"),
    [
        ("qwen3", {}, Begun.MODEL),
        ("qwen3", {"enable_thinking": False}, Begun.CLOSED),
        ("qwen3.5", {}, Begun.OPEN),
        ("qwen3.5", {"enable_thinking": False}, Begun.CLOSED),
        ("r1", {}, Begun.OPEN),
        ("deepseek-v3.1", {}, Begun.CLOSED),
        ("deepseek-v3.1", {"thinking": True}, Begun.OPEN),
        ("mistral", {}, Begun.MODEL),
        ("gpt-oss", {}, Begun.MODEL),
        ("gemma", {}, Begun.CLOSED),
        ("gemma", {"enable_thinking": True}, Begun.MODEL),
    ],
)
def test_the_end_of_a_prompt_tells_whether_a_thought_is_open(
    name: str, kwargs: dict[str, Any], begun: Begun
) -> None:
    assert look(name, **kwargs) is begun


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        ("<think>\nI shall", Begun.OPEN),
        ("<think>\nso</think>\nIt is", Begun.CLOSED),
        ("It is", Begun.CLOSED),
        ("", Begun.MODEL),
    ],
)
def test_an_answer_that_is_continued_tells_it_by_its_own_text(text: str, begun: Begun) -> None:
    assert find("qwen3").look_at_message(text) is begun


def read(reader: ThoughtReader, pieces: Sequence[str]) -> tuple[Part, ...]:
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.add(piece)
    parts += reader.flush()
    assert all(part.text for part in parts if isinstance(part, Content | Thought))
    return join_parts(parts)


def think_reader(is_open: bool = False, **given: Any) -> ThoughtReader:
    return ThoughtReader("<think>", "</think>", is_open=is_open, **given)


@pytest.mark.parametrize(
    ("is_open", "text", "parts"),
    [
        (False, "<think>\na\nb\n</think>\n\nc\n", (Thought("a\nb"), Content("c\n"))),
        (False, "\n <think>a</think>b", (Thought("a"), Content("b"))),
        (True, "a</think>b<think>c", (Thought("a"), Content("b<think>c"))),
        (True, "\n\n</think>\n\nb", (Content("b"),)),
        (True, "a </thin\n", (Thought("a </thin\n"),)),
        (False, "  <thing>", (Content("  <thing>"),)),
        (False, "a <think>b</think>", (Content("a <think>b</think>"),)),
        (False, "<thi", (Content("<thi"),)),
        (False, "\n", (Content("\n"),)),
        (True, "", ()),
        (False, "<think>", ()),
    ],
)
def test_thoughts_are_parted_from_content(is_open: bool, text: str, parts: tuple[Part, ...]) -> None:
    assert read(think_reader(is_open), [text]) == parts
    assert read(think_reader(is_open), list(text)) == parts


pieces = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<",
            "</",
            "think",
            ">",
            "\n",
            "\r\n",
            "a",
            " b",
            "<thi",
            "[T]",
            "[",
            "T]",
            "é",
        ]
    ),
    max_size=14,
).map("".join)


@given(pieces, st.data(), st.booleans())
def test_parts_do_not_depend_on_how_the_text_was_cut(text: str, data: st.DataObject, is_open: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    split = [text[start:end] for start, end in pairwise(edges)]
    for hidden in ((), ("[T]",)):
        whole = read(think_reader(is_open, hidden=hidden), [text])
        assert read(think_reader(is_open, hidden=hidden), split) == whole
        assert read(think_reader(is_open, hidden=hidden), list(text)) == whole


def test_what_follows_the_thoughts_goes_to_the_inner_reader() -> None:
    reader = think_reader(inner=ThoughtReader("[a]", "[b]", is_open=False))
    assert read(reader, ["<think>x</think>\n[a]y[b]z"]) == (Thought("xy"), Content("z"))


def choose(family: str, tokens: list[int], tokenizer: Tokenizer) -> tuple[Choice, tuple[Part, ...]]:
    reasoning = Reasoning(family, tokenizer)
    choice = Choice(
        tokenizer.detokenizer(visible=reasoning.visible),
        StopStrings([]),
        reader=reasoning.make_reader(Begun.MODEL, None),
    )
    parts: list[Part] = []
    for token in tokens:
        delta = choice.add(TokenBatch((token,)))
        assert delta is not None and delta.parts is not None
        parts += delta.parts
    return choice, join_parts(parts)


def test_marks_that_are_special_tokens_are_seen_and_never_shown() -> None:
    tokenizer = make_tokenizer(TEMPLATES["mistral"])
    tokens = tokenizer.encode("[THINK]ab[/THINK]c[/THINK]d<|im_end|>", add_special_tokens=False)
    choice, parts = choose("mistral", tokens, tokenizer)
    assert parts == (Thought("ab"), Content("cd"))
    assert choice.num_thought_tokens == 4  # both marks included


def test_every_family_has_marks_that_its_signs_find() -> None:
    for family, marks in FAMILIES.items():
        template = "{{ messages[0].content }}{# " + marks.begin + marks.end + " #}"
        found = find_reasoning(make_tokenizer(template))
        assert found is not None and found.family == family
        assert marks.closing.strip().endswith(marks.end)
