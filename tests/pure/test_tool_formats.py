"""Tool calls in each family's own form: found from the template, rendered, read, and held to a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from levserve.errors import BadRequest, StartupError
from levserve.generation import join_parts
from levserve.text.chat import render_chat, render_text
from levserve.text.grammar import GrammarKind, Grammars, GrammarText
from levserve.text.parts import CallArguments, CallStart, Content, Part, Thought
from levserve.text.tokenizer import Tokenizer
from levserve.text.tools.families import BY_NAME as FORMATS
from levserve.text.tools.model_tools import ModelTools
from levserve.text.tools.request import CallMode, Tool, ToolRequest
from levserve.text.vocabulary import Vocabulary
from tests.pure.tool_templates import BY_NAME as FAMILY
from tests.pure.tool_templates import FAMILIES, PARIS, Family

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOL_F = Tool("f", "forecast", PARAMETERS, "tools[0].function")
TOOL_G = Tool("g", None, None, "tools[1].function")
TOOLS = (TOOL_F, TOOL_G)


def make_tokenizer(template: str, specials: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with every byte and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", *specials])
    ends = {"<eos>", "<|call|>", "<|return|>"} & {"<eos>", *specials}
    eos_ids = frozenset(backend.token_to_id(end) for end in ends)
    return Tokenizer(Vocabulary(backend, eos_token="<eos>", eos_ids=eos_ids, chat_template=template))


class Model:
    """A family's tokenizer, and the tool format that was found for it."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tokenizer = make_tokenizer(family.template, family.specials)
        self.tools = ModelTools(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size, lambda seconds: None)

    def ask(self, mode: CallMode = CallMode.AUTO, **fields: Any) -> ToolRequest:
        return ToolRequest(TOOLS, mode, **fields)

    def read(self, pieces: Sequence[str], asked: ToolRequest | None = None) -> tuple[Part, ...]:
        reader = self.tools.make_reader(asked or self.ask())
        assert reader is not None
        parts: list[Part] = []
        for piece in pieces:
            found = reader.add(piece)
            assert all(part.text for part in found if not isinstance(part, CallStart)), "no part is empty"
            parts += found
        return join_parts([*parts, *reader.flush()])

    def fits(self, asked: ToolRequest, text: str, content: GrammarText | None = None) -> tuple[str, bool]:
        """How much of the text the constraint takes, and whether the answer may end there."""
        held = None if content is None else self.grammars.compile(content)
        constraint = self.tools.constrain(asked, held, self.grammars)
        assert constraint is not None
        matcher = constraint.start()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        for count, token in enumerate(tokens):
            is_end = token in self.tokenizer.eos_ids
            if matcher.is_over or not matcher.allows(token) or is_end:
                taken = self.tokenizer.decode(tokens[:count], skip_special_tokens=False)
                if is_end and count == len(tokens) - 1:
                    taken = text
                return taken, matcher.is_over or matcher.allows(min(self.tokenizer.eos_ids))
            matcher.take(token)
        return text, matcher.is_over or matcher.allows(min(self.tokenizer.eos_ids))

    def render(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = ()) -> str:
        history = self.tools.history
        named = history.template_tools(tools)
        return render_text(
            self.tokenizer,
            history.adapt(messages, tools),
            template_kwargs={} if named is None else {"tools": named},
        )


_models: dict[str, Model] = {}


def model_of(name: str) -> Model:
    if name not in _models:
        _models[name] = Model(FAMILY[name])
    return _models[name]


def without_ids(parts: Sequence[Part]) -> list[Part]:
    return [part._replace(id="") if isinstance(part, CallStart) else part for part in parts]


every_family = pytest.mark.parametrize("name", [family.name for family in FAMILIES])
several_calls = pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.texts[1]])
ONE = [CallStart(0, "", "f"), CallArguments(0, PARIS)]
TWO = [*ONE, CallStart(1, "", "g"), CallArguments(1, "{}")]


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("f", {"city": "Paris", "days": 2}, "call_of_another_server")],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "call_of_another_server"},
]


@every_family
def test_the_format_is_found_from_the_template(name: str) -> None:
    assert model_of(name).tools.form is FORMATS[name]


def test_a_template_that_leaves_quotation_marks_out_is_found_too() -> None:
    template = FAMILY["pythonic"].template.replace("'{{ value }}'", "{{ value }}")
    assert template != FAMILY["pythonic"].template
    assert ModelTools(make_tokenizer(template)).form is FORMATS["pythonic"]


def test_a_template_that_shows_calls_only_beside_tools_is_found_too() -> None:
    template = "{%- if tools %}" + FAMILY["hermes"].template + "{%- else %}No tools.{%- endif %}"
    assert ModelTools(make_tokenizer(template)).form is FORMATS["hermes"]


@every_family
def test_a_call_in_the_history_is_rendered_as_the_model_writes_it(name: str) -> None:
    text = model_of(name).render(CONVERSATION, TOOLS)
    if name == "harmony":
        assert f"to=functions.f<|channel|>commentary json<|message|>{PARIS}<|call|>" in text
    else:
        written = re.sub("abcDEFxyz", "[a-zA-Z0-9]{9}", re.escape(FAMILY[name].texts[0]))
        squeezed = re.sub(r'"', "[\"']", re.sub(r"(\\\n|\\ |\s)", "", written))
        if name == "mistral":
            squeezed = squeezed.replace(r"\}\}\]", r'\},"id":"[a-zA-Z0-9]{9}"\}\]').replace(r"\}\}", r"\}")
        assert re.search(squeezed.replace(r"\},\"id", r"\},\"id"), "".join(text.split())), text
    assert text.index("sunny") > text.index("Paris")


@every_family
def test_tools_are_in_the_prompt(name: str) -> None:
    text = model_of(name).render(CONVERSATION[:2], TOOLS)
    for wanted in ("f", '"days"', "maximum"):
        assert wanted in text
    assert model_of(name).render(CONVERSATION[:2]).count("maximum") == 0


@every_family
def test_a_call_is_read_the_same_however_its_text_is_split(name: str) -> None:
    model = model_of(name)
    text = FAMILY[name].texts[0]
    for end in range(len(text) + 1):
        assert without_ids(model.read([text[:end], text[end:]])) == ONE, text[:end]
    assert without_ids(model.read(list(text))) == ONE


@several_calls
def test_several_calls_are_read_the_same_however_their_text_is_split(name: str) -> None:
    model = model_of(name)
    text = FAMILY[name].texts[1]
    assert text is not None
    for end in range(len(text) + 1):
        assert without_ids(model.read([text[:end], text[end:]])) == TWO, text[:end]
    assert without_ids(model.read(list(text))) == TWO


@every_family
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_reads_the_same_whole_as_in_pieces(name: str, data: st.DataObject) -> None:
    """Also rubbish, half calls and calls of functions that do not exist."""
    model = model_of(name)
    one, two = FAMILY[name].texts
    fragments = [one, two or one, one[:7], one[7:], one.replace("Paris", "}\\"), one.replace("f", "nope", 1)]
    fragments += ["Hello ", "\n", "<", "[", "{", '"', " ", model.tools.form.trigger, "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=5)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = without_ids(model.read([text]))
    assert without_ids(model.read(pieces)) == whole
    assert without_ids(model.read(list(text))) == whole


@every_family
def test_a_call_that_is_cut_off_is_given_as_far_as_it_came(name: str) -> None:
    text = FAMILY[name].texts[0]
    *_, last = model_of(name).read([text[: text.index("2")]])
    assert isinstance(last, CallArguments)
    assert PARIS.startswith(last.text) and "Paris" in last.text


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.is_at_start])
def test_a_call_that_is_cut_off_before_its_name_is_complete_is_left_out(name: str) -> None:
    form = FORMATS[name]
    start = form.opening + form.before
    for end in range(len(form.trigger), len(start) + 1):
        if form.trigger in start[:end]:
            assert model_of(name).read([start[:end]]) == ()


# Not harmony, whose marks are tokens.
@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.name != "harmony"])
def test_marks_around_calls_are_left_out_wherever_an_answer_is_cut_off(name: str) -> None:
    model, (one, two) = model_of(name), FAMILY[name].texts
    for text in (one, two or one):
        for end in range(len(text)):
            parts = model.read([text[:end]], model.ask(CallMode.REQUIRED))
            assert not any(isinstance(part, Content) for part in parts), text[:end]
    for end in range(one.index("2"), len(one)):
        assert not any(isinstance(part, Content) for part in model.read([one[:end]])), one[:end]


@every_family
def test_a_call_of_a_function_that_does_not_exist_is_content(name: str) -> None:
    model = model_of(name)
    asked = ToolRequest((TOOL_G,))
    text = FAMILY[name].texts[0]
    parts = model.read([text], asked)
    assert all(isinstance(part, Content) for part in parts)
    shown = "".join(part.text for part in parts if isinstance(part, Content))
    assert shown == (PARIS if name == "harmony" else text)


@pytest.mark.parametrize(
    "name", [f.name for f in FAMILIES if not FORMATS[f.name].is_at_start and f.name != "harmony"]
)
def test_text_around_calls_is_content(name: str) -> None:
    text = f"I look.\n\n{FAMILY[name].texts[0]}\nDone."
    assert without_ids(model_of(name).read([text])) == [Content("I look."), *ONE, Content("Done.")]


@every_family
def test_text_without_a_call_is_passed_on_as_it_is(name: str) -> None:
    for text in ("Hello\n", "  a < b and [1, 2] \n\n", '{"a": 1}', "", "<tool"):
        expected = [Content(text)] if text else []
        assert without_ids(model_of(name).read(list(text))) == expected


@every_family
def test_an_answer_that_must_call_is_one_call_that_fits(name: str) -> None:
    model = model_of(name)
    text = FAMILY[name].texts[0]
    asked = model.ask(CallMode.REQUIRED, is_parallel=False)
    assert model.fits(asked, text) == (text, True)
    taken, _ = model.fits(asked, "Hello")
    assert taken == ""
    taken, _ = model.fits(asked, text.replace("f", "h", 1) if name != "olmo3" else text.replace("f(", "h("))
    assert len(taken) < len(text)
    taken, _ = model.fits(asked, text.replace("2", "44"))
    assert "44" not in taken
    taken, _ = model.fits(asked, text.replace("city", "town"))
    assert "town" not in taken
    named = model.ask(CallMode.REQUIRED, allowed=frozenset({"g"}), is_parallel=False)
    taken, _ = model.fits(named, text)
    assert PARIS not in taken and len(taken) < len(text)


@several_calls
def test_several_calls_fit_unless_they_are_not_wanted(name: str) -> None:
    model = model_of(name)
    two = FAMILY[name].texts[1]
    assert two is not None
    assert model.fits(model.ask(CallMode.REQUIRED, is_parallel=True), two) == (two, True)
    taken, _ = model.fits(model.ask(CallMode.REQUIRED, is_parallel=False), two)
    assert len(taken) < len(two)
    default, _ = model.fits(model.ask(CallMode.REQUIRED), two)
    assert default == (taken if name == "prompt" else two), (
        "it was not trained for calls and would repeat its own"
    )


@every_family
def test_text_is_free_and_a_call_is_held_from_its_mark_on(name: str) -> None:
    model = model_of(name)
    one, two = FAMILY[name].texts
    start = "" if FORMATS[name].is_at_start or name == "harmony" else "I look. "
    assert model.fits(model.ask(), "Hello, [world] {1} <a>") == ("Hello, [world] {1} <a>", True)
    assert model.fits(model.ask(), start + one) == (start + one, True)
    taken, _ = model.fits(model.ask(), start + one.replace("2", "44"))
    assert "44" not in taken
    if two is not None:
        assert model.fits(model.ask(is_parallel=True), start + two) == (start + two, True)


@every_family
def test_content_of_a_schema_or_a_call_may_come(name: str) -> None:
    model = model_of(name)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    content = GrammarText(GrammarKind.JSON_SCHEMA, json.dumps(schema), "response_format")
    text = FAMILY[name].texts[0]
    assert model.fits(model.ask(is_parallel=False), text, content) == (text, True)
    assert model.fits(model.ask(), '{"a": 1}', content) == ('{"a": 1}', True)
    assert model.fits(model.ask(), "Hello", content)[0] == ""
    assert model.fits(model.ask(CallMode.NONE), text, content)[0] != text
    grammar = GrammarText(GrammarKind.GRAMMAR, 'root ::= "ab"', "grammar")
    assert model.fits(model.ask(), "ab", grammar) == ("ab", True)
    assert model.fits(model.ask(is_parallel=False), text, grammar) == (text, True)


@every_family
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "string"},
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}},
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_schema_that_cannot_be_held_is_named(name: str, parameters: dict[str, Any]) -> None:
    model = model_of(name)
    asked = ToolRequest((TOOL_F, Tool("h", None, parameters, "tools[1].function")), CallMode.REQUIRED)
    with pytest.raises(BadRequest) as caught:
        model.tools.constrain(asked, None, model.grammars)
    assert caught.value.param == "tools[1].function.parameters"


def test_a_name_overrides_what_was_found_and_must_exist() -> None:
    tokenizer = make_tokenizer(FAMILY["prompt"].template)
    assert ModelTools(tokenizer, "hermes").form is FORMATS["hermes"]
    with pytest.raises(StartupError, match="hermes"):
        ModelTools(tokenizer, "hermes3")


def test_the_log_says_if_the_template_knows_no_tools() -> None:
    assert model_of("hermes").tools.description == "hermes"
    assert "no tools" in model_of("prompt").tools.description


def test_harmony_tells_thoughts_calls_and_answer_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.f <|constrain|>json<|message|>{PARIS}<|call|>"
    )
    model = model_of("harmony")
    assert without_ids(model.read(list(text))) == [Thought("I think."), *ONE]
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    for end in range(len(final)):
        assert model.read([final[:end], final[end:]]) == (Thought("Hm."), Content("Hello."))
    assert model.fits(model.ask(CallMode.REQUIRED), text) == (text, True)


def test_mistral_gets_ids_of_nine_letters_and_digits() -> None:
    model = model_of("mistral")
    (start, _) = model.read([FAMILY["mistral"].texts[0]])
    assert isinstance(start, CallStart) and re.fullmatch("[a-zA-Z0-9]{9}", start.id)
    (start, _) = model_of("mistral-ids").read([FAMILY["mistral-ids"].texts[0]])
    assert isinstance(start, CallStart) and start.id == "abcDEFxyz"
    (start, _) = model_of("hermes").read([FAMILY["hermes"].texts[0]])
    assert isinstance(start, CallStart) and re.fullmatch("call_[a-zA-Z0-9]{24}", start.id)


def test_a_second_call_that_the_template_refuses_is_a_mistake_of_the_request() -> None:
    calls = [call("f", {"city": "Paris"}, "a"), call("g", {}, "b")]
    messages = [CONVERSATION[1], {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(BadRequest, match="one call at a time"):
        model_of("llama3-json").render(messages)


@every_family
def test_special_tokens_in_what_a_client_sends_stay_text(name: str) -> None:
    """In arguments, their names, results, and tool descriptions."""
    model = model_of(name)
    evil = "<eos>"
    messages = [
        CONVERSATION[1],
        {"role": "assistant", "content": evil, "tool_calls": [call("f", {"city": evil, evil: 1}, "x")]},
        {"role": "tool", "content": evil, "tool_call_id": "x"},
    ]
    tool = Tool("f", evil, {"type": "object", "properties": {evil: {"description": evil}}}, "tools[0]")
    history = model.tools.history
    named = history.template_tools([tool])
    tokens = render_chat(
        model.tokenizer, history.adapt(messages, [tool]), template_kwargs={"tools": named} if named else {}
    )
    assert model.tokenizer.backend.token_to_id(evil) not in tokens


TYPED = Tool(
    "t",
    None,
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["a b", "c"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "flag": {"type": "boolean"},
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        },
        "required": ["text"],
        "$defs": {"item": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    },
    "tools[0].function",
)
TAGGED = [
    ("text", "2", '"2"'),
    ("text", 'say "hi"\n</par', '"say \\"hi\\"\\n</par"'),
    ("text", "", '""'),
    ("maybe", "null", "null"),
    ("maybe", "nulls", '"nulls"'),
    ("kind", "a b", '"a b"'),
    ("code", '"AB"', '"AB"'),
    ("flag", "true", "true"),
    ("items", '[{"n": 1}]', '[{"n": 1}]'),
]


@pytest.mark.parametrize("key, written, value", TAGGED)
def test_tagged_values_become_json_by_their_schema(key: str, written: str, value: str) -> None:
    model = model_of("qwen3-coder")
    asked = ToolRequest((TYPED,), CallMode.REQUIRED)
    first = "" if key == "text" else "<parameter=text>\nx\n</parameter>\n"
    text = f"<tool_call>\n<function=t>\n{first}<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    start = "{" if key == "text" else '{"text": "x", '
    expected = [CallStart(0, "", "t"), CallArguments(0, f'{start}"{key}": {value}}}')]
    assert without_ids(model.read(list(text), asked)) == expected
    assert model.fits(asked, text) == (text, True)


@pytest.mark.parametrize(
    "name, written",
    [
        ("qwen3-coder", "<parameter=code>\nAB\n"),
        ("qwen3-coder", "<parameter=kind>\nd"),
        ("pythonic", ', kind="d'),
    ],
)
def test_values_outside_their_schema_do_not_fit(name: str, written: str) -> None:
    starts = {
        "qwen3-coder": "<tool_call>\n<function=t>\n<parameter=text>\nx\n</parameter>\n",
        "pythonic": '[t(text="x"',
    }
    text = starts[name] + written
    taken, _ = model_of(name).fits(ToolRequest((TYPED,), CallMode.REQUIRED), text)
    assert starts[name] in taken and taken != text


@pytest.mark.parametrize(
    "written, value",
    [
        ("True", "true"),
        ("None", "null"),
        ("'it\\'s'", '"it\'s"'),
        ('"a, b)"', '"a, b)"'),
        ("{'a': [1, (2)]}", '{"a": [1, 2]}'),
        ("1.50", "1.50"),
        ("Paris", '"Paris"'),
    ],
)
def test_python_values_become_json(written: str, value: str) -> None:
    expected = [CallStart(0, "", "f"), CallArguments(0, f'{{"city": {value}, "days": 1}}')]
    assert without_ids(model_of("pythonic").read(list(f"[f(city={written}, days=1)]"))) == expected


def test_arguments_are_the_models_own_characters() -> None:
    odd = '{"city":"P\\u0061ris \\" } ]",  "days" :2.0e0}'
    text = f'<tool_call>{{"name":"f","arguments":{odd}}}</tool_call>'
    assert without_ids(model_of("hermes").read(list(text))) == [ONE[0], CallArguments(0, odd)]


def test_a_format_that_shows_no_tools_describes_them_in_the_system_message() -> None:
    model = model_of("prompt")
    text = model.render(CONVERSATION, TOOLS)
    assert text.index("Be brief.") < text.index('"name": "f"') < text.index("Weather?")
    assert "<|user|><tool_response>\nsunny\n</tool_response>" in text
    assert text.count("<|system|>") == 1
    assert model.render(CONVERSATION[1:2], TOOLS).startswith("<|system|>You can call")


def test_a_template_without_a_system_role_gets_the_tools_in_the_first_question() -> None:
    template = (
        "{%- for message in messages %}{%- if message.role == 'system' %}{{ raise_exception('no') }}"
        "{%- endif %}<|{{ message.role }}|>{{ message.content }}{%- endfor %}"
    )
    model = Model(Family("prompt", template, ("", None)))
    assert model.render(CONVERSATION[1:2], TOOLS).startswith("<|user|>You can call")
