"""The third step of a start: the weights and the tokenizer, in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

from levserve.device.memory_error import explained
from levserve.device.platform import free_bytes
from levserve.device.sizing import human
from levserve.errors import StartupError, cause_of
from levserve.model.placement import device_bytes
from levserve.models.checks import check_draft_tokens
from levserve.models.kind import AnyKind
from levserve.observe.logs import redirect_library_logs
from levserve.observe.metrics import Metrics
from levserve.settings.settings import Settings
from levserve.text.chat import check_template, template_of
from levserve.text.grammar import Grammars
from levserve.text.reasoning import Reasoning, find_reasoning
from levserve.text.tokenizer import Tokenizer, load_tokenizer
from levserve.text.tools.model_tools import ModelTools

log = logging.getLogger(__name__)

FEWER_BYTES = "serve a smaller model, or the same one in fewer bits (--quantize)"


@dataclass(frozen=True, slots=True)
class Contents:
    """What the model's files hold."""

    arrays: dict[str, jax.Array]
    tokenizer: Tokenizer
    grammars: Grammars
    tools: ModelTools
    reasoning: Reasoning | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on each device."""
        return sum(map(device_bytes, self.arrays.values()))


def read(description: AnyKind, metrics: Metrics, report: Callable[[str], None]) -> Contents:
    """Raises `StartupError` for files that cannot be read or do not fit into memory."""
    settings, files = description.settings, description.files
    asked = f"{human(description.expected_weight_bytes)} for the weights"
    with (
        explained(asked, FEWER_BYTES, lambda: free_bytes(*description.devices)),
        ThreadPoolExecutor(1, thread_name_prefix="levserve-tokenizer") as beside,
    ):
        texts = beside.submit(
            _read_texts,
            settings,
            files.tokenizer or files.path,
            description.vocab_size,
            description.default_chat_template,
            metrics,
        )
        if files.draft is not None:
            drafter = load_tokenizer(files.draft.tokenizer or files.draft.path)
            check_draft_tokens(files.draft.name, texts.result()[0], drafter)
        arrays = description.load_arrays(report)
        contents = Contents(arrays, *texts.result())
    redirect_library_logs()  # loading the tokenizer may have installed handlers
    return contents


def _read_texts(
    settings: Settings, path: Path, vocab_rows: int, default_template: str | None, metrics: Metrics
) -> tuple[Tokenizer, Grammars, ModelTools, Reasoning | None]:
    tokenizer = load_tokenizer(path, chat_template=_read_chat_template(settings))
    if default_template is not None and template_of(tokenizer) is None:
        tokenizer.chat_template = default_template
        log.info("chats: the tokenizer has no template, so a chat is the text of its last user message")
    check_template(tokenizer)
    grammars = Grammars(tokenizer, vocab_rows, metrics.note_grammar)
    tools = ModelTools(tokenizer, settings.tool_format)
    log.info("tool calls: %s", tools.description)
    reasoning = find_reasoning(tokenizer, settings.reasoning)
    if reasoning is not None:
        log.info("reasoning: %s", reasoning.description)
    return tokenizer, grammars, tools, reasoning


def _read_chat_template(settings: Settings) -> str | None:
    if not settings.chat_template:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"--chat-template {settings.chat_template} cannot be read: {cause_of(error)}"
        ) from error
