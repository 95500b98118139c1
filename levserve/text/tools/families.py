"""The formats of the known families of models. Each is data; a new family is one more entry."""

from __future__ import annotations

from levserve.text.tools.body import JsonBody, PythonBody, TaggedBody
from levserve.text.tools.format import ToolFormat

IN_OBJECT = JsonBody('", "arguments": ', has_more=True)
"""The rest of `{"name": "f", "arguments": {...}}` after the name's first quotation mark."""
NAME = '{"name": "'


def deepseek_token(words: str) -> str:
    """A special token of DeepSeek, with wide bars, and a low block for each space."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = deepseek_token("tool calls begin"), deepseek_token("tool calls end")
CALL_BEGIN, CALL_END = deepseek_token("tool call begin"), deepseek_token("tool call end")
SEP = deepseek_token("tool sep")
DEEPSEEK_TOKENS = (CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END)
HARMONY_TOKENS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

FORMATS = (
    ToolFormat(
        "hermes",
        IN_OBJECT,
        before=f"<tool_call>\n{NAME}",
        after="}\n</tool_call>",
        trigger="<tool_call>",
        visible=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "qwen3-coder",
        TaggedBody(
            after_name=">\n",
            before_key="<parameter=",
            after_key=">",
            before_value="",
            after_value="</parameter>",
            end="</function>",
            pad="\n",
        ),
        before="<tool_call>\n<function=",
        after="\n</tool_call>",
        trigger="<tool_call>",
        visible=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "llama3-json",
        JsonBody('", "parameters": ', has_more=True),
        before=NAME,
        after="}",
        trigger=NAME,
        is_at_start=True,
        is_single=True,
    ),
    ToolFormat(
        "pythonic",
        PythonBody(),
        before="",
        separator=", ",
        opening="[",
        closing="]",
        trigger="[",
        is_at_start=True,
        shown_as="[QQfun(QQkey=",  # some templates leave the quotation marks out
    ),
    ToolFormat(
        "mistral",
        IN_OBJECT,
        before=NAME,
        after="}",
        separator=", ",
        opening="[TOOL_CALLS][",
        closing="]",
        trigger="[TOOL_CALLS]",
        visible=("[TOOL_CALLS]",),
        has_short_ids=True,
    ),
    ToolFormat(
        "mistral-ids",
        JsonBody("[CALL_ID]", after_id="[ARGS]"),
        before="[TOOL_CALLS]",
        separator="",
        trigger="[TOOL_CALLS]",
        visible=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        has_short_ids=True,
    ),
    ToolFormat(
        "mistral-args",
        JsonBody("[ARGS]"),
        before="[TOOL_CALLS]",
        separator="",
        trigger="[TOOL_CALLS]",
        visible=("[TOOL_CALLS]", "[ARGS]"),
        has_short_ids=True,
    ),
    ToolFormat(
        "phi4",
        IN_OBJECT,
        before=NAME,
        after="}",
        separator=", ",
        opening="<|tool_call|>[",
        closing="]<|/tool_call|>",
        trigger="<|tool_call|>",
        visible=("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolFormat(
        "phi4-functools",
        IN_OBJECT,
        before=NAME,
        after="}",
        separator=", ",
        opening="functools[",
        closing="]",
        trigger="functools[",
    ),
    ToolFormat(
        "granite",
        IN_OBJECT,
        before=NAME,
        after="}",
        separator=", ",
        opening="<|tool_call|>[",
        closing="]",
        trigger="<|tool_call|>",
        visible=("<|tool_call|>",),
    ),
    ToolFormat(
        "deepseek-v3",
        JsonBody("\n```json\n"),
        before=f"{CALL_BEGIN}function{SEP}",
        after=f"\n```{CALL_END}",
        opening=CALLS_BEGIN,
        closing=CALLS_END,
        trigger=CALLS_BEGIN,
        visible=DEEPSEEK_TOKENS,
    ),
    ToolFormat(
        "deepseek-v3.1",
        JsonBody(SEP),
        before=CALL_BEGIN,
        after=CALL_END,
        separator="",
        opening=CALLS_BEGIN,
        closing=CALLS_END,
        trigger=CALLS_BEGIN,
        visible=DEEPSEEK_TOKENS,
    ),
    ToolFormat(
        "glm4",
        TaggedBody(
            after_name="\n",
            before_key="<arg_key>",
            after_key="</arg_key>",
            before_value="\n<arg_value>",
            after_value="</arg_value>",
            end="",
        ),
        before="<tool_call>",
        after="</tool_call>",
        trigger="<tool_call>",
        visible=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    ToolFormat(
        "olmo3",
        PythonBody(),
        before="",
        opening="<function_calls>\n",
        closing="\n</function_calls>",
        trigger="<function_calls>",
        shown_as="<function_calls>QQfun(QQkey=",
        visible=("<function_calls>", "</function_calls>"),
    ),
    ToolFormat(
        "harmony",
        JsonBody(" <|constrain|>json<|message|>"),
        before="<|channel|>commentary to=functions.",
        after="<|call|>",
        trigger=" to=functions.",
        is_single=True,
        visible=HARMONY_TOKENS,
        shown_as="to=functions.QQfun",
        has_channels=True,
    ),
)
PROMPTED = ToolFormat(
    "prompt",
    IN_OBJECT,
    before=f"<tool_call>{NAME}",
    after="}</tool_call>",
    trigger="<tool_call>",
    visible=("<tool_call>", "</tool_call>"),
)
"""For templates that know no tools: the server describes the tools and this format in the system message."""

BY_NAME = {form.name: form for form in (*FORMATS, PROMPTED)}
