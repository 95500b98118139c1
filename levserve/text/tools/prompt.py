"""What the server says of tools where the chat template cannot: a part of the system message."""

from __future__ import annotations

import json
from collections.abc import Sequence

from levserve.text.tools.format import SpeltCall, ToolFormat
from levserve.text.tools.request import Tool

PROMPT = """You can call these functions:
{functions}

To call a function, answer with its name and its arguments in this form:
{example}
The result then comes between <tool_response> and </tool_response>."""


def describe_tools(tools: Sequence[Tool], form: ToolFormat) -> str:
    functions = [json.dumps(tool.describe(), ensure_ascii=False) for tool in tools]
    example = form.spell([SpeltCall("function_name", {"argument": "value"}, "")])
    return PROMPT.format(functions="\n".join(functions), example=example)
