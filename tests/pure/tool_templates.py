"""Chat templates of the model families, reduced to how they handle tools, and what the models write."""

from __future__ import annotations

from dataclasses import dataclass

WIDE = "\uff5c"
LOW = "\u2581"
BEGIN = "{%- for message in messages %}"
END = "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
OTHER = "{%- else %}<|{{ message.role }}|>{{ message.content }}{%- endif %}"
LIST = "{%- if tools %}<|system|>Tools: {%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{%- endif %}"
CALLS = "{%- if message.role == 'assistant' and message.tool_calls %}<|assistant|>{{ message.content }}"
EACH = "{%- for call in message.tool_calls %}{%- set call = call.function %}"


def deepseek(words: str) -> str:
    return f"<{WIDE}{words.replace(' ', LOW)}{WIDE}>"


CALLS_BEGIN, CALLS_END = deepseek("tool calls begin"), deepseek("tool calls end")
CALL_BEGIN, CALL_END, SEP = deepseek("tool call begin"), deepseek("tool call end"), deepseek("tool sep")


@dataclass(frozen=True)
class Family:
    """`texts`: what the model writes for one call, f(city="Paris", days=2), and for two, f and then g()."""

    name: str
    template: str
    texts: tuple[str, str | None]
    specials: tuple[str, ...] = ()


def json_call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


PARIS = '{"city": "Paris", "days": 2}'
F, G = json_call("f", PARIS), json_call("g", "{}")

FAMILIES = [
    Family(
        "hermes",
        LIST + BEGIN + CALLS + EACH + '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": '
        "{{ call.arguments | tojson }}}\n</tool_call>{%- endfor %}" + OTHER + END,
        (
            f"<tool_call>\n{F}\n</tool_call>",
            f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
        ),
    ),
    Family(
        "qwen3-coder",
        LIST + BEGIN + CALLS + EACH + "<tool_call>\n<function={{ call.name }}>\n"
        "{%- for name, value in call.arguments | items %}<parameter={{ name }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{%- endfor %}"
        "</function>\n</tool_call>{%- endfor %}" + OTHER + END,
        (
            "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ),
    ),
    Family(
        "llama3-json",
        LIST
        + BEGIN
        + CALLS
        + "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
        + EACH
        + '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{%- endfor %}'
        + OTHER
        + END,
        (json_call("f", PARIS, "parameters"), None),
        ("<|python_tag|>",),
    ),
    Family(
        "pythonic",
        LIST + BEGIN + CALLS + "[" + EACH + "{{ call.name }}("
        "{%- for name, value in call.arguments | items %}{{ name }}={%- if value is string %}'{{ value }}'"
        "{%- else %}{{ value }}{%- endif %}{%- if not loop.last %}, {% endif %}{%- endfor %})"
        "{%- if not loop.last %}, {% endif %}{%- endfor %}]" + OTHER + END,
        ('[f(city="Paris", days=2)]', '[f(city="Paris", days=2), g()]'),
    ),
    Family(
        "mistral",
        "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
        + BEGIN
        + CALLS
        + "[TOOL_CALLS]["
        + "{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}"
        "{{ raise_exception('ids have nine characters') }}{%- endif %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
        '"id": "{{ call.id }}"}{%- if not loop.last %}, {% endif %}{%- endfor %}]' + OTHER + END,
        (f"[TOOL_CALLS][{F}]", f"[TOOL_CALLS][{F}, {G}]"),
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    Family(
        "mistral-ids",
        "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
        + BEGIN
        + CALLS
        + "{%- for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}"
        "[ARGS]{{ call.function.arguments | tojson }}{%- endfor %}" + OTHER + END,
        (
            f"[TOOL_CALLS]f[CALL_ID]abcDEFxyz[ARGS]{PARIS}",
            f"[TOOL_CALLS]f[CALL_ID]abcDEFxyz[ARGS]{PARIS}[TOOL_CALLS]g[CALL_ID]abcDEFxyw[ARGS]{{}}",
        ),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    Family(
        "mistral-args",
        "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
        + BEGIN
        + CALLS
        + EACH
        + "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}{%- endfor %}"
        + OTHER
        + END,
        (f"[TOOL_CALLS]f[ARGS]{PARIS}", f"[TOOL_CALLS]f[ARGS]{PARIS}[TOOL_CALLS]g[ARGS]{{}}"),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    Family(
        "phi4",
        BEGIN + "{%- if message.role == 'system' and tools %}<|system|><|tool|>{{ tools | tojson }}<|/tool|>"
        "{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endif %}" + END,
        (f"<|tool_call|>[{F}]<|/tool_call|>", f"<|tool_call|>[{F}, {G}]<|/tool_call|>"),
        ("<|tool_call|>", "<|/tool_call|>", "<|tool|>", "<|/tool|>", "<|end|>"),
    ),
    Family(
        "phi4-functools",
        "{%- if tools %}<|system|>Answer as functools[{...}]. Functions: {{ tools | tojson }}{%- endif %}"
        + BEGIN
        + "<|{{ message.role }}|>{{ message.content }}"
        + END,
        (f"functools[{F}]", f"functools[{F}, {G}]"),
    ),
    Family(
        "granite",
        "{%- if tools %}<|system|>Write <|tool_call|> and a JSON list. Functions: {{ tools | tojson }}"
        "{%- endif %}" + BEGIN + "<|{{ message.role }}|>{{ message.content }}" + END,
        (f"<|tool_call|>[{F}]", f"<|tool_call|>[{F}, {G}]"),
        ("<|tool_call|>",),
    ),
    Family(
        "deepseek-v3",
        LIST + BEGIN + "{%- if message.role == 'assistant' and message.content is none %}<|assistant|>"
        f"{CALLS_BEGIN}"
        + EACH
        + f"{CALL_BEGIN}function{SEP}"
        + "{{ call.name + '\\n```json\\n' + call.arguments"
        f" + '\\n```' }}}}{CALL_END}" + "{%- if not loop.last %}{{ '\\n' }}{%- endif %}{%- endfor %}"
        f"{CALLS_END}" + OTHER + END,
        (
            f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f\n```json\n{PARIS}\n```{CALL_END}{CALLS_END}",
            f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f\n```json\n{PARIS}\n```{CALL_END}\n"
            f"{CALL_BEGIN}function{SEP}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        ),
        (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP),
    ),
    Family(
        "deepseek-v3.1",
        LIST + BEGIN + CALLS + f"{CALLS_BEGIN}" + EACH + f"{CALL_BEGIN}{{{{ call.name }}}}{SEP}"
        "{{ call.arguments | tojson }}" + f"{CALL_END}" + "{%- endfor %}" + f"{CALLS_END}" + OTHER + END,
        (
            f"{CALLS_BEGIN}{CALL_BEGIN}f{SEP}{PARIS}{CALL_END}{CALLS_END}",
            f"{CALLS_BEGIN}{CALL_BEGIN}f{SEP}{PARIS}{CALL_END}{CALL_BEGIN}g{SEP}{{}}{CALL_END}{CALLS_END}",
        ),
        (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP),
    ),
    Family(
        "glm4",
        LIST + BEGIN + CALLS + EACH + "\n<tool_call>{{ call.name }}\n"
        "{%- for name, value in call.arguments | items %}<arg_key>{{ name }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{%- endfor %}</tool_call>"
        "{%- endfor %}" + OTHER + END,
        (
            "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        ),
    ),
    Family(
        "olmo3",
        LIST + BEGIN + CALLS + "<function_calls>\n" + EACH + "{{ call.name }}("
        "{%- for name, value in call.arguments | items %}{{ name }}={{ value | tojson }}"
        "{%- if not loop.last %}, {% endif %}{%- endfor %})\n{%- endfor %}</function_calls>" + OTHER + END,
        (
            '<function_calls>\nf(city="Paris", days=2)\n</function_calls>',
            '<function_calls>\nf(city="Paris", days=2)\ng()\n</function_calls>',
        ),
    ),
    Family(
        "harmony",
        "{%- if tools %}<|start|>developer<|message|>{%- for tool in tools %}"
        "type {{ tool.function.name }} = ({{ tool.function.parameters | tojson }}) => any;{%- endfor %}<|end|>"
        "{%- endif %}"
        + BEGIN
        + "{%- if message.role == 'assistant' and message.tool_calls %}"
        + "<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json"
        "<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{%- endif %}",
        (f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{PARIS}<|call|>", None),
        (
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
    ),
    Family(
        "prompt",
        BEGIN + "<|{{ message.role }}|>{{ message.content }}" + END,
        (f"<tool_call>{F}</tool_call>", f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>"),
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
