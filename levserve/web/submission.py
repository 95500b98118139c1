"""From a parsed body to the sequences the engine runs: tokenized, checked against the model, seeded.

Called on HTTP threads, before anything reaches the device thread: what leaves here fits the model.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.text.chat import render_chat
from levserve.text.tokenizer import Tokenizer
from levserve.web.choices import stop_ids_of, stops_here
from levserve.web.schema import ChatBody, CompletionBody


class Seeds:
    """Gives a seed to each request that brings none: fresh entropy, or a fixed sequence when the operator set a base."""

    def __init__(self, base: int | None) -> None:
        self._base = base
        self._numbers = (
            itertools.count()
        )  # `next` on it is one step under the GIL, so HTTP threads may share it

    def draw(self) -> int:
        if self._base is None:
            return random.getrandbits(64)
        return int.from_bytes(
            hashlib.blake2b(b"%d:%d" % (self._base, next(self._numbers)), digest_size=8).digest()
        )


class Defaults(NamedTuple):
    """What the operator lets a request have that does not say; 0 and None leave it to OpenAI's contract."""

    max_tokens: int
    temperature: float | None

    def apply_to(self, body: ChatBody | CompletionBody) -> ChatBody | CompletionBody:
        has_limit = body.max_tokens is not None or (
            isinstance(body, ChatBody) and body.max_completion_tokens is not None
        )
        if self.max_tokens and not has_limit:
            body = structs.replace(body, max_tokens=self.max_tokens)
        if self.temperature is not None and body.temperature is None:
            body = structs.replace(body, temperature=self.temperature)
        return body


class Submission(NamedTuple):
    """The tokens of each prompt, and the sequences to run: prompt-major, equally many for each prompt."""

    prompts: list[list[int]]
    requests: list[GenerationRequest]


def prepare(
    body: ChatBody | CompletionBody, model: ServedModel, seeds: Seeds, engine_id: str, deadline: float | None
) -> Submission:
    """Checks the body against the model and makes its sequences; raises `BadRequest`."""
    prompts = _tokenize(body, model)
    check_token_ids("logit_bias", body.logit_bias or (), model.tokenizer)
    check_token_ids("stop_token_ids", body.stop_token_ids or (), model.tokenizer)
    limits = [_fit(prompt, body, model) for prompt in prompts]
    stop_ids = frozenset() if stops_here(body) else stop_ids_of(body, model.tokenizer)
    seed = seeds.draw() if body.seed is None else body.seed
    samplings = [_sampling(body, seed + choice) for choice in range(body.num_sequences)]
    pairs = itertools.product(zip(prompts, limits, strict=True), enumerate(samplings))
    requests = [
        GenerationRequest(
            f"{engine_id}-{index}",
            tuple(prompt),
            limit,
            sampling,
            stop_ids,
            deadline,
            score_from=_score_from(prompt, body) if choice == 0 else None,
            shares_prompt_of=None if choice == 0 else f"{engine_id}-{index - choice}",
        )
        for index, ((prompt, limit), (choice, sampling)) in enumerate(pairs)
    ]
    return Submission(prompts, requests)


def encode_text(
    text: str | list[int], model: ServedModel, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Tokens of a text; those that the client gave itself are checked and taken as they are."""
    if isinstance(text, str):
        check_length(len(text), model, param)
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    check_token_ids(param, text, model.tokenizer)
    return text


def check_length(num_chars: int, model: ServedModel, param: str, num_messages: int = 0) -> None:
    """Refuses what is too long for the model however it is tokenized, which takes seconds for a few megabytes."""
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


def _tokenize(body: ChatBody | CompletionBody, model: ServedModel) -> list[list[int]]:
    if isinstance(body, CompletionBody):
        adds_special = body.add_special_tokens is not False
        return [
            encode_text(prompt, model, "prompt", add_special_tokens=adds_special) for prompt in body.prompts
        ]
    messages = [message.to_template() for message in body.messages]
    check_length(
        sum(len(message["content"]) for message in messages), model, "messages", num_messages=len(messages)
    )
    try:
        tokens = render_chat(
            model.tokenizer,
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message is True,
            template_kwargs=body.chat_template_kwargs,
        )
    except RecursionError:
        raise BadRequest(
            "'chat_template_kwargs' is nested too deeply.", param="chat_template_kwargs"
        ) from None
    return [tokens]


def _fit(prompt: Sequence[int], body: ChatBody | CompletionBody, model: ServedModel) -> int:
    """The most tokens that may follow this prompt."""
    param = "prompt" if isinstance(body, CompletionBody) else "messages"
    if not prompt:
        raise BadRequest("The prompt has no tokens.", param=param)
    room = model.max_seq_len - len(prompt)
    limit = max(room, 1) if body.max_length is None else body.max_length
    if limit > room:
        raise ContextTooLong(len(prompt), limit, model.max_seq_len, param=param)
    if (body.min_tokens or 0) > limit:
        raise BadRequest(
            f"'min_tokens' is {body.min_tokens}, but at most {limit} tokens are generated.",
            param="min_tokens",
        )
    return limit


def _sampling(body: ChatBody | CompletionBody, seed: int) -> Sampling:
    """The body's words as ours; what was left out keeps the default that changes nothing."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    return Sampling(
        **{name: value for name, value in given.items() if value is not None},
        top_k=max(body.top_k or 0, 0),
        logit_bias=tuple((body.logit_bias or {}).items()),
        min_tokens=body.min_tokens or 0,
        seed=seed,
        num_logprobs=body.num_computed_logprobs,
    )


def _score_from(prompt: Sequence[int], body: ChatBody | CompletionBody) -> int | None:
    """For the first choice of a prompt: its scores are the same for all of them, so one computes them."""
    is_wanted = (body.shows_prompt and body.num_logprobs is not None) or body.prompt_logprobs is not None
    return 1 if is_wanted and len(prompt) > 1 else None
