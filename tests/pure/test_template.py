"""Chat templates render as in transformers, with what real templates use and nothing beyond the sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from levserve.errors import StartupError
from levserve.text.template import render_template

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% generation %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
    {% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
TRIMS = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] | trim }}[end]\n{% endfor %}"
)
LOOPS = """{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{{ loop.index }}: {{ message.content }}
{% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}"""
REASONS = """{% set ns = namespace(last=-1, self='x') %}
{% for message in messages if message.reasoning_content %}{% set ns.last = loop.index0 %}{% endfor %}
{{ ns.last }}{{ ns.self }}{% for message in messages %}<{{ message.thinking }}>{{ message.content }}{{ message | tojson }}{% endfor %}"""
JSON = """{{ messages | tojson(indent=2) }}
{{ tools | tojson(separators=(',', ':'), sort_keys=True) }} {{ tools | tojson(ensure_ascii=True) }}
{{ dict(a=1) | tojson }} {{ dict.fromkeys('ab', 0) }} {{ documents is none }} {{ tools is defined }}"""
DATED = "{% set day = strftime_now('%d %b %Y') %}{{ bos_token }}Today is {{ day }}.{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "trims": TRIMS,
    "loops": LOOPS,
    "reasons": REASONS,
    "json": JSON,
    "dated": DATED,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "<b>für</b> 東京 & 'more'",
            "parameters": {"type": "object"},
        },
    }
]
MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": 'Is 1 < 2 & "3" é?'},
    {"role": "assistant", "content": "Yes", "reasoning": "one\ntwo"},
    {"role": "user", "content": "  Why?\n"},
    {"role": "assistant", "content": " Because of  \n"},
]


def rendered(
    template: str, messages: list[dict[str, Any]] = MESSAGES, *, continues: bool = False, **names: Any
) -> str:
    return render_template(
        template, messages, names, add_generation_prompt=not continues, continue_final_message=continues
    )


@pytest.mark.parametrize(
    "names",
    [{}, {"tools": TOOLS}, {"tools": TOOLS, "documents": [{"title": "é"}]}],
    ids=["bare", "tools", "all"],
)
@pytest.mark.parametrize(
    ("name", "continues"),
    [*((name, False) for name in TEMPLATES), ("chatml", True), ("trims", True), ("dated", True)],
)
def test_text_is_the_one_transformers_renders(name: str, continues: bool, names: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {**names, "bos_token": "<s>"}
    (expected,), _ = render_jinja_template(
        [MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **names,
    )
    assert expected
    assert rendered(TEMPLATES[name], continues=continues, **names) == expected


def test_final_message_is_left_open_with_its_spaces_or_without_as_the_template_has_it() -> None:
    assert rendered("{% for m in messages %}{{ m.content }}|{% endfor %}", continues=True).endswith(
        "|  Why?\n| Because of  \n"
    )
    assert rendered(TRIMS, continues=True).endswith("[assistant]Because of")
    assert MESSAGES[-1]["content"] == " Because of  \n"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }}", "{{ messages[-1].content[:3] }}", "{{ messages[-1].content[3:] }}"],
)
def test_final_message_that_the_template_leaves_out_cannot_be_continued(template: str) -> None:
    with pytest.raises(ValueError, match="final message"):
        rendered(template, continues=True)


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("value", ["find", ["find"], {"name": "find"}, 3])
def test_tools_and_documents_are_lists_of_objects(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"'{name}' must be a list of objects"):
        rendered("", **{name: value})


def test_exception_of_a_template_carries_its_message() -> None:
    with pytest.raises(TemplateError, match="^only three$"):
        rendered("{{ raise_exception('only three') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ lipsum.__globals__.os }}",
        "{{ dict.__class__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__html__=1) }}",
        "{{ namespace({'_x': 1}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))(1) }}",
    ],
)
def test_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(SecurityError):
        rendered(template)


@pytest.mark.parametrize(
    ("template", "told"),
    [("\n{% if %}", "line 2: Expected"), ("{% generation %}", "line 1"), ("{% break %}", "'break'")],
)
def test_broken_template_stops_the_start(template: str, told: str) -> None:
    with pytest.raises(StartupError, match=f"the chat template is broken.*{told}"):
        rendered(template)
