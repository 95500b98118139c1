"""Makes a parsed body into the sequences that the engine runs: tokenized, checked against the model, seeded.

Called on HTTP threads. Nothing reaches the device thread that does not fit the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import structs

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest, ContextTooLong
from levserve.generation import Choice
from levserve.schedule.request import GenerationRequest, Sampling
from levserve.text.chat import render_chat
from levserve.text.tokenizer import Tokenizer
from levserve.web.choices import make_choices
from levserve.web.schema import ChatBody, CompletionBody, GenerationBody

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


class Defaults(NamedTuple):
    """The operator's defaults for fields that a request leaves out; 0 and None leave OpenAI's."""

    max_tokens: int
    temperature: float | None

    def apply_to(self, body: GenerationBody) -> GenerationBody:
        has_limit = body.max_tokens is not None or (
            isinstance(body, ChatBody) and body.max_completion_tokens is not None
        )
        if self.max_tokens and not has_limit:
            body = structs.replace(body, max_tokens=self.max_tokens)
        if self.temperature is not None and body.temperature is None:
            body = structs.replace(body, temperature=self.temperature)
        return body


class Submission(NamedTuple):
    """Each prompt's tokens; the sequences, prompt-major, equally many per prompt; each one's choice."""

    prompts: list[list[int]]
    requests: list[GenerationRequest]
    choices: list[Choice]


def prepare(
    body: GenerationBody, model: ServedModel, seeds: Seeds, engine_id: str, deadline: float | None
) -> Submission:
    """Checks the body against the model and makes its sequences; raises `BadRequest`."""
    prompts = _tokenize(body, model)
    check_token_ids("logit_bias", body.logit_bias or (), model.tokenizer)
    check_token_ids("stop_token_ids", body.stop_token_ids or (), model.tokenizer)
    limits = [_fit(prompt, body, model) for prompt in prompts]
    device_stops, choice_stops = _stop_ids(body, model.tokenizer)
    seed = seeds.draw() if body.seed is None else body.seed
    samplings = [_sampling(body, seed + number) for number in range(body.num_sequences)]
    requests: list[GenerationRequest] = []
    for prompt, limit in zip(prompts, limits, strict=True):
        first_id = f"{engine_id}-{len(requests)}"
        for sampling in samplings:
            request_id = f"{engine_id}-{len(requests)}"
            is_first = request_id == first_id
            requests.append(
                GenerationRequest(
                    request_id,
                    tuple(prompt),
                    limit,
                    sampling,
                    device_stops,
                    deadline,
                    score_from=_score_from(prompt, body) if is_first else None,
                    shares_prompt_of=None if is_first else first_id,
                )
            )
    return Submission(prompts, requests, make_choices(body, model.tokenizer, prompts, choice_stops))


def encode_text(
    text: str | list[int], model: ServedModel, param: str, *, add_special_tokens: bool
) -> list[int]:
    """The tokens of a text; tokens that the client gave are checked and used as they are."""
    if isinstance(text, str):
        check_length(len(text), model, param)
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    check_token_ids(param, text, model.tokenizer)
    return text


def check_length(num_chars: int, model: ServedModel, param: str, num_messages: int = 0) -> None:
    """Refuses a text that no tokenization can make fit: tokenizing megabytes takes seconds."""
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


def _tokenize(body: GenerationBody, model: ServedModel) -> list[list[int]]:
    if isinstance(body, CompletionBody):
        adds_special = body.add_special_tokens is not False
        return [
            encode_text(prompt, model, body.prompt_param, add_special_tokens=adds_special)
            for prompt in body.prompts
        ]
    assert isinstance(body, ChatBody)
    messages = [message.to_template() for message in body.messages]
    num_chars = sum(len(message["content"]) for message in messages)
    check_length(num_chars, model, "messages", num_messages=len(messages))
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


def _fit(prompt: Sequence[int], body: GenerationBody, model: ServedModel) -> int:
    """The most tokens that may follow this prompt."""
    param = body.prompt_param
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


def _stop_ids(body: GenerationBody, tokenizer: Tokenizer) -> tuple[frozenset[int], frozenset[int]]:
    """The stop tokens that end a sequence on the device, and those that end its choice; one set is empty.

    The device does not report the stop token itself. lm-evaluation-harness asks for one token after a scored
    prompt and drops the last entry of the lists, which must be there even if it is a stop token: then the
    choice looks for it. With `min_tokens` the device must know the stop tokens, to ban them.
    """
    stop_ids = frozenset(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids |= tokenizer.eos_ids
    is_listed = body.shows_prompt and body.num_logprobs is not None and not body.min_tokens
    return (frozenset(), stop_ids) if is_listed else (stop_ids, frozenset())


def _sampling(body: GenerationBody, seed: int) -> Sampling:
    """The body's sampling fields; a field that was left out keeps the default, which changes nothing."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    given |= {
        "top_k": max(body.top_k or 0, 0),
        "logit_bias": tuple((body.logit_bias or {}).items()),
        "seed": seed,
        "num_logprobs": body.num_computed_logprobs,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def _score_from(prompt: Sequence[int], body: GenerationBody) -> int | None:
    """For the first sequence of a prompt, which computes the scores for all of them."""
    is_shown = body.shows_prompt and body.num_logprobs is not None
    is_wanted = is_shown or body.prompt_logprobs is not None
    return 1 if is_wanted and len(prompt) > 1 else None
