"""Turns a parsed body into the sequences that the engine runs: tokenized, checked against the model, seeded.

Called on HTTP threads. Only what fits the model reaches the device thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from levserve.device.sizing import TOKENS_PER_ROW
from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.generation import Choice
from levserve.request.choices import make_choices
from levserve.request.constraint import make_constraint
from levserve.request.policy import NO_POLICY, Policy
from levserve.request.schema import ChatBody, CompletionBody, GenerationBody
from levserve.request.thinking import find_thinking, template_kwargs
from levserve.request.tool_use import find_tool_use, make_conversation
from levserve.request.truncation import Truncation, bos_of, keep_last
from levserve.schedule.request import GenerationRequest, LogprobsMode, Sampling
from levserve.text.chat import render_chat
from levserve.text.infill import Infill, find_infill
from levserve.text.tokenizer import Tokenizer

ANSWER_SHARE = 4
"""A prompt that is cut to fit leaves a quarter of the context to an answer whose length was not given."""
LEAST_TOP_P = 1e-6
"""What a `top_p` of 0 counts as: less than the likeliest token's probability, so that it alone is kept."""
SAMPLING_FIELDS = [field.name for field in dataclasses.fields(Sampling)]


class Seeds:
    """Gives seeds to requests that bring none: random ones, or with a `base` a fixed sequence."""

    def __init__(self, base: int | None) -> None:
        self._base = base
        self._numbers = itertools.count()  # `next` is atomic under the GIL, so HTTP threads may share it

    def draw(self) -> int:
        if self._base is None:
            return random.getrandbits(64)
        text = b"%d:%d" % (self._base, next(self._numbers))
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


class Submission(NamedTuple):
    """Each prompt's tokens; the sequences, prompt-major, equally many per prompt; each one's choice."""

    prompts: list[list[int]]
    requests: list[GenerationRequest]
    choices: list[Choice]
    warnings: list[str]


def prepare(
    body: GenerationBody,
    model: ServedModel,
    seeds: Seeds,
    engine_id: str,
    deadline: float | None,
    policy: Policy = NO_POLICY,
) -> Submission:
    """Checks the body against the model and makes its sequences; raises `BadRequest`.

    The policy has been applied to the body already.
    """
    # Cut from the left, a prompt with a suffix would lose the mark at its beginning.
    truncates = policy.truncates_prompts and not body.text_after
    truncation = Truncation(body.truncate_prompt_tokens, truncates)
    whole = tokenize(body, model, checks_length=not truncation)
    prompts = [_cut(prompt, body, model, policy, truncation) for prompt in whole]
    cut = [len(prompt) < len(before) for prompt, before in zip(prompts, whole, strict=True)]
    check_token_ids("logit_bias", body.logit_bias or (), model.tokenizer)
    check_token_ids("stop_token_ids", body.stop_token_ids or (), model.tokenizer)
    params = [body.prompt_param]
    if len(prompts) > 1:
        params = [f"{body.prompt_param}[{index}]" for index in range(len(prompts))]
    limits = [
        _fit(prompt, body, model, policy.open_limit, param)
        for prompt, param in zip(prompts, params, strict=True)
    ]
    allowed = body.allowed_token_ids or ()
    check_token_ids("allowed_token_ids", allowed, model.tokenizer)
    check_rows(allowed, model, "allowed_token_ids")
    thinking = find_thinking(body, model, prompts)
    tool_use = find_tool_use(body, model)
    constraint = None
    if body.max_length != 0:
        hold_answer = partial(tool_use.hold, grammars=model.grammars, add_thoughts=thinking.constrain)
        constraint = make_constraint(body, model.tokenizer, model.grammars, hold_answer)
    device_stops, choice_stops = _stop_ids(body, model.tokenizer)
    seed = seeds.draw() if body.seed is None else body.seed
    sampling = _sampling(body, seed)
    requests: list[GenerationRequest] = []
    for prompt, limit in zip(prompts, limits, strict=True):
        first_number = len(requests)
        for number in range(first_number, first_number + body.num_sequences):
            is_first = number == first_number
            requests.append(
                GenerationRequest(
                    f"{engine_id}-{number}",
                    tuple(prompt),
                    limit,
                    # Every sequence has its own seed: equal prompts in one request get different samples.
                    dataclasses.replace(sampling, seed=seed + number),
                    device_stops,
                    deadline,
                    score_from=_score_from(prompt, body) if is_first else None,
                    constraint=constraint,
                    shares_prompt_of=None if is_first else f"{engine_id}-{first_number}",
                    priority=body.priority or 0,
                )
            )
    choices = make_choices(
        body,
        model.tokenizer,
        prompts,
        choice_stops,
        cut,
        make_reader=lambda: thinking.make_reader(tool_use.make_reader()),
        visible=thinking.visible | tool_use.visible,
    )
    return Submission(prompts, requests, choices, truncation.warnings(body.prompt_param, model.max_seq_len))


def count_reserved(requests: Sequence[GenerationRequest], body: GenerationBody, model: ServedModel) -> int:
    """The tokens that the sequences of a body count as, against the bound on all accepted work.

    A request without a limit may fill the whole context but hardly ever does: it counts as a long chat.
    """
    most = TOKENS_PER_ROW if body.max_length is None else model.max_seq_len
    return sum(len(request.prompt) + min(request.max_tokens, most) for request in requests)


def encode_text(
    text: str | list[int],
    model: ServedModel,
    param: str,
    *,
    add_special_tokens: bool,
    checks_length: bool = True,
) -> list[int]:
    """The tokens of a text; tokens that the client gave are checked and used as they are."""
    if isinstance(text, str):
        if checks_length:
            check_length(len(text), model, param)
        tokens = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        check_rows(tokens, model, param)
        return tokens
    check_token_ids(param, text, model.tokenizer)
    check_rows(text, model, param)
    return text


def check_rows(tokens: Sequence[int], model: ServedModel, param: str) -> None:
    """Refuses tokens that the tokenizer has and the model, made with fewer of them, does not."""
    if model.num_rows and tokens and max(tokens) >= model.num_rows:
        raise BadRequest(
            f"'{param}' has the token id {max(tokens)}, which this model has no weights for: "
            f"its ids are 0 to {model.num_rows - 1}.",
            param=param,
        )


def check_length(num_chars: int, model: ServedModel, param: str, num_messages: int = 0) -> None:
    """Refuses a text that is too long for any tokenization to fit: tokenizing megabytes takes seconds."""
    if max(num_chars, num_messages) <= model.max_seq_len:
        return
    least = max(num_chars // model.tokenizer.longest_token, num_messages)
    if least > model.max_seq_len:
        raise ContextTooLong(least, 0, model.max_seq_len, param=param, at_least="at least ")


def check_token_ids(param: str, tokens: Sequence[int] | dict[int, float], tokenizer: Tokenizer) -> None:
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise BadRequest(
                f"'{param}' has the token id {token}; this model's are 0 to {tokenizer.vocab_size - 1}.",
                param=param,
            )


def tokenize(body: GenerationBody, model: ServedModel, *, checks_length: bool) -> list[list[int]]:
    """The tokens of each prompt, before it is cut to fit."""
    if isinstance(body, CompletionBody):
        adds_special = body.add_special_tokens is not False
        if body.text_after:
            return [_surround(prompt, body, model, adds_special) for prompt in body.prompts]
        return [
            encode_text(
                prompt,
                model,
                body.prompt_param,
                add_special_tokens=adds_special,
                checks_length=checks_length,
            )
            for prompt in body.prompts
        ]
    assert isinstance(body, ChatBody)
    try:
        conversation = make_conversation(
            body.messages, body.find_tools(), template_kwargs(body, model), model
        )
    except RecursionError:
        raise BadRequest("'messages' is nested too deeply.", param="messages") from None
    if checks_length:
        check_length(conversation.num_chars, model, "messages", num_messages=len(body.messages))
    try:
        tokens = render_chat(
            model.tokenizer,
            conversation.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message is True,
            template_kwargs=conversation.template_kwargs,
        )
    except RecursionError:
        raise BadRequest(
            "'chat_template_kwargs' is nested too deeply.", param="chat_template_kwargs"
        ) from None
    check_rows(tokens, model, "messages")
    return [tokens]


def _surround(
    prefix: str | list[int], body: CompletionBody, model: ServedModel, add_special_tokens: bool
) -> list[int]:
    """The prompt with which the model writes the text between a prefix and the suffix."""
    infill = _require_infill(model.tokenizer)
    check_length(len(body.text_after), model, "suffix")
    if isinstance(prefix, str):
        check_length(len(prefix), model, body.prompt_param)
        before = infill.encode_prefix(prefix)
    else:
        check_token_ids(body.prompt_param, prefix, model.tokenizer)
        before = prefix
    tokens = infill.make_prompt(before, body.text_after, add_special_tokens=add_special_tokens)
    check_rows(tokens, model, body.prompt_param)
    return tokens


def _require_infill(tokenizer: Tokenizer) -> Infill:
    """Raises `BadRequest` for a model that cannot fill in the middle."""
    infill = find_infill(tokenizer)
    if infill is None:
        raise BadRequest(
            "'suffix' is for models that were trained to fill in the middle, and this model's vocabulary has "
            "no tokens for that.",
            param="suffix",
            code="unsupported_parameter",
        )
    return infill


def _cut(
    prompt: list[int], body: GenerationBody, model: ServedModel, policy: Policy, truncation: Truncation
) -> list[int]:
    """The prompt, or its end if it is to be cut."""
    if not truncation:
        return prompt
    if body.max_length is not None:
        needed = wanted = body.max_length
    else:
        # Any room is enough for a prompt that fits; one that is cut leaves some for an answer.
        needed = 1
        wanted = max(min(policy.open_limit or model.max_seq_len, model.max_seq_len // ANSWER_SHARE), 1)
    kept = truncation.num_kept(len(prompt), model.max_seq_len - needed, model.max_seq_len - wanted)
    is_text = not isinstance(body, CompletionBody) or isinstance(body.prompts[0], str)
    return keep_last(prompt, kept, bos_of(model.tokenizer) if is_text else None)


def _fit(prompt: Sequence[int], body: GenerationBody, model: ServedModel, open_limit: int, param: str) -> int:
    """The most tokens that may follow this prompt; `param` names it in errors."""
    if not prompt:
        raise BadRequest(f"'{param}' has no tokens.", param=param)
    room = model.max_seq_len - len(prompt)
    if body.max_length is not None:
        limit = min(body.max_length, max(room, 1)) if body.cuts_limit else body.max_length
    else:
        limit = min(max(room, 1), open_limit or model.max_seq_len)
    if limit > room:
        raise ContextTooLong(len(prompt), limit, model.max_seq_len, param=param)
    if (body.min_tokens or 0) > limit:
        raise BadRequest(
            f"'min_tokens' is {body.min_tokens}, but at most {limit} tokens are generated.",
            param="min_tokens",
        )
    return limit


def _stop_ids(body: GenerationBody, tokenizer: Tokenizer) -> tuple[frozenset[int], frozenset[int]]:
    """The stop tokens that end a sequence on the device, and those that end its choice; one set is empty.

    The device does not report the stop token itself. lm-evaluation-harness asks for one token after a scored
    prompt and drops the last entry of the lists, so this entry must exist even if it is a stop token: in this
    case the choice checks for stop tokens. With `min_tokens` the device must know them, to ban them.
    """
    stop_ids = frozenset(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids |= tokenizer.eos_ids
        if body.text_after:
            stop_ids |= _require_infill(tokenizer).stop_ids
    is_listed = body.shows_prompt and body.num_logprobs is not None and not body.min_tokens
    return (frozenset(), stop_ids) if is_listed else (stop_ids, frozenset())


def _sampling(body: GenerationBody, seed: int) -> Sampling:
    """The body's sampling fields; a field that was left out keeps the default, which changes nothing."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    given |= {
        "temperature": body.default_temperature if body.temperature is None else body.temperature,
        "top_k": max(body.top_k or 0, 0),
        "top_p": None if body.top_p is None else max(body.top_p, LEAST_TOP_P),
        "logit_bias": tuple((body.logit_bias or {}).items()),
        "seed": seed,
        "num_logprobs": body.num_computed_logprobs,
        "logprobs_mode": body.logprobs_mode and LogprobsMode(body.logprobs_mode),
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def _score_from(prompt: Sequence[int], body: GenerationBody) -> int | None:
    """Where scoring begins: in a prompt's first sequence, for all of them. None if no scores are wanted."""
    is_shown = body.shows_prompt and body.num_logprobs is not None
    is_wanted = is_shown or body.prompt_logprobs is not None
    return 1 if is_wanted and len(prompt) > 1 else None
