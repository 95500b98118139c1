"""Writes the parts of the reference pages that follow from declarations in the code.

    python docs/generate.py

fills every `<!-- generated: NAME -->` of `docs/pages`. A test compares the pages with the output, so
they cannot go stale. The meaning of a route, a field or an error is written once, in
`levserve/web/descriptions.py`; a missing description, or one of something that does not exist, is an
error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from levserve import errors
from levserve.answers.embeddings import EmbeddingBody
from levserve.answers.scoring import ScoreBody
from levserve.engine.engine import Engine
from levserve.models.registry import Registry
from levserve.observe.metrics import Metrics
from levserve.observe.vllm_metrics import VllmMetrics
from levserve.request.chat_message import UNSUPPORTED_IN_MESSAGE
from levserve.request.constraint import ConstraintFields
from levserve.request.schema import (
    UNSUPPORTED,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from levserve.settings.alias import names_of
from levserve.settings.kind import Setting
from levserve.settings.parse import parse_settings
from levserve.settings.settings import SECTIONS, settings_of
from levserve.web.admin import ReloadBody
from levserve.web.app import create_app
from levserve.web.batches.objects import BatchBody
from levserve.web.descriptions import ERRORS, ROUTES, describe_field
from levserve.web.messages.body import MessageBody, PromptBody
from levserve.web.native import GenerateBody
from levserve.web.openapi import is_refused, list_routes
from levserve.web.responses.body import UNSUPPORTED_IN_RESPONSES, ResponseBody
from levserve.web.tokens import ConversationBody, DetokenizeBody, TokenizeBody
from levserve.web.watcher import Watcher

PAGES = Path(__file__).parent / "pages"
GENERATED = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- /generated -->)", re.DOTALL)

BODIES: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "GenerationBody": ("", GenerationBody),
    "ConstraintFields": ("", ConstraintFields),
    "ChatBody": ("/v1/chat/completions", ChatBody),
    "CompletionBody": ("/v1/completions", CompletionBody),
    "ResponseBody": ("/v1/responses", ResponseBody),
    "MessageBody": ("/v1/messages", MessageBody),
    "PromptBody": ("/v1/messages/count_tokens", PromptBody),
    "BatchBody": ("/v1/batches", BatchBody),
    "EmbeddingBody": ("/v1/embeddings", EmbeddingBody),
    "ScoreBody": ("/loglikelihood", ScoreBody),
    "GenerateBody": ("/generate", GenerateBody),
    "TokenizeBody": ("/tokenize", TokenizeBody),
    "DetokenizeBody": ("/detokenize", DetokenizeBody),
    "ConversationBody": ("/apply_template", ConversationBody),
    "ReloadBody": ("/admin/reload", ReloadBody),
}

ABSTRACT = {"RetryLater"}


NOUNS: dict[type[inspect.Type], str] = {
    inspect.AnyType: "any value",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
    inspect.DictType: "object",
    inspect.StructType: "object",
}


def blocks() -> dict[str, Callable[[], str]]:
    """The function that makes each generated part."""
    return {
        "settings": _settings,
        "endpoints": _endpoints,
        "refused": _refused,
        "errors": _errors,
        "metrics": _metrics,
        "vllm-metrics": _vllm_metrics,
    }


def render(page: str) -> str:
    """The page with its generated parts as they should be."""
    return GENERATED.sub(lambda match: f"{match[1]}\n{_make(match[2]).rstrip()}\n\n{match[3]}", page)


def _make(name: str) -> str:
    kind, *bodies = name.split()
    if kind == "fields":
        return "\n\n".join(_fields(body, is_titled=len(bodies) > 1) for body in bodies)
    return blocks()[kind]()


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = ["| " + " | ".join(cells) + " |" for cells in (names, *rows)]
    lines.insert(1, "|" + "---|" * len(names))
    return "\n".join(lines).replace("|  |", "| |")


def _settings() -> str:
    lines = ["| option | environment | value | default | meaning |", "|---|---|---|---|---|"]
    for section, title in SECTIONS.items():
        lines.append(f"| **`[{section}]`** | | | | *{title}* |")
        for s in settings_of(section):
            default = s.show(s.default)
            lines.append(f"| `{s.flag}` | `{s.variable}` | {s.kind.words} | `{default}` | {_meaning(s)} |")
    return "\n".join(lines) + "\n"


def _meaning(s: Setting) -> str:
    others = [f"`{name}`" for name in names_of(s.name)]
    return f"{s.help} Aliases: {', '.join(others)}." if others else s.help


def _endpoints() -> str:
    watcher = Watcher()
    try:
        app = create_app(Registry(Engine(max_inflight=1, metrics=Metrics())), parse_settings([], {}), watcher)
    finally:
        watcher.stop()
    found = set(list_routes(app.url_map))
    described = set(ROUTES)
    for route, meaning in ROUTES.items():
        if meaning.endswith("also under `/v1`"):
            described.add(route.replace(" /", " /v1/"))
    _require_equal("routes", described, found)
    return _table(("request", "what it does"), ([f"`{route}`", meaning] for route, meaning in ROUTES.items()))


def _fields(name: str, *, is_titled: bool) -> str:
    path, kind = BODIES[name]
    is_generation = issubclass(kind, GenerationBody)
    rows = []
    for field in msgspec.structs.fields(kind):
        info = inspect.type_info(field.type)
        refused = is_refused(kind, field.name)
        if is_generation and (refused or field.name not in kind.__annotations__):
            continue  # refused fields, and those that both endpoints have, have tables of their own
        if refused:
            rows.append([f"`{field.name}`", "", "refused"])
            continue
        meaning = describe_field(name, field.name)
        required = ", required" if field.required else ""
        rows.append([f"`{field.name}`", _words(info) + required, meaning])
    title = f"Fields of `{path}`:\n\n" if is_titled else ""
    return title + _table(("field", "value", "meaning"), rows)


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.UnionType(types):
            return " or ".join(_words(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.IntType() | inspect.FloatType():
            return _noun(info) + _bounds(info)
        case inspect.ListType(inspect.UnionType(types)):
            return f"list of {', '.join(map(_plural, types[:-1]))} or {_plural(types[-1])}"
        case inspect.ListType(item):
            return f"list of {_plural(item)}"
    return _noun(info)


def _plural(info: inspect.Type) -> str:
    return f"lists of {_plural(info.item_type)}" if isinstance(info, inspect.ListType) else f"{_noun(info)}s"


def _noun(info: inspect.Type) -> str:
    return NOUNS[type(info)]


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    """The bounds in words, without those that only keep a number inside its machine type."""
    low, high = info.ge, info.le
    if high is not None and high >= 2**31 - 1:
        high = None
    if low is not None and low <= -(2**63):
        low = None
    if info.gt is not None:
        return f" above {info.gt:g}" + (f", up to {high:g}" if high is not None else "")
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return f", at least {low:g}" if low is not None and not math.isinf(low) else ""


def _refused() -> str:
    def rows(table: Any, place: str) -> list[list[str]]:
        return [[f"`{name}`", place, _harmless(values)] for name, values in table.items()]

    return _table(
        ("field", "in", "accepted all the same"),
        rows(UNSUPPORTED, "both")
        + rows(UNSUPPORTED_IN_CHAT, "chat")
        + rows(UNSUPPORTED_IN_COMPLETIONS, "completions")
        + rows(UNSUPPORTED_IN_MESSAGE, "a chat's messages")
        + rows(UNSUPPORTED_IN_RESPONSES, "responses"),
    )


def _harmless(values: tuple[object, ...]) -> str:
    return ", ".join(["null", *(f"`{json.dumps(value)}`" for value in values)])


def _errors() -> str:
    declared = {}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.ServeError) and name not in ABSTRACT:
            declared[name] = value
    _require_equal("errors", set(ERRORS), set(declared))
    rows = []
    for name, kind in sorted(declared.items(), key=lambda item: (item[1].status, item[1].code or "")):
        code = f"`{kind.code}`" if kind.code else ""
        rows.append([str(kind.status), f"`{kind.type}`", code, ERRORS[name]])
    return _table(("status", "type", "code", "when"), rows)


def _metrics() -> str:
    metrics = Metrics()
    rows = []
    for collector in metrics.registry._collector_to_names:
        if not isinstance(collector, MetricWrapperBase):
            continue  # a collector of the process's own metrics
        labels = collector._labelnames
        for family in collector.describe():
            rows.append(
                [
                    f"`{_sample_name(family)}`",
                    family.type,
                    ", ".join(f"`{label}`" for label in labels),
                    family.documentation,
                ]
            )
    return _table(("metric", "type", "labels", "meaning"), rows)


def _vllm_metrics() -> str:
    metrics = Metrics()
    metrics.model_info.labels("model", 32, 1).set(1)
    metrics.kv_pages_total.set(1)
    names = set(re.findall(r"^# TYPE (\S+)", VllmMetrics(metrics).render(), re.MULTILINE))
    return "\n".join(f"- `{name}`" for name in sorted(names))


def _sample_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _require_equal(what: str, described: set[str], found: set[str]) -> None:
    if described != found:
        raise SystemExit(
            f"{what}: not described {sorted(found - described)}, not there {sorted(described - found)}"
        )


def main() -> None:
    for path in sorted(PAGES.rglob("*.md")):
        before = path.read_text()
        after = render(before)
        if after != before:
            path.write_text(after)
            print(f"wrote {path.relative_to(PAGES.parent.parent)}")


if __name__ == "__main__":
    main()
