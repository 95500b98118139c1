"""Joins what the sequences of one request gained into the parts of a whole answer.

Used on HTTP threads and by batches. The choices are prompt-major, equally many for each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from levserve.answers.answer import Answer
from levserve.answers.logprobs import PromptLogprobs, prompt_logprobs
from levserve.engine.served_model import ServedModel
from levserve.generation import Choice, Delta, join_deltas
from levserve.request.choices import rank_choices
from levserve.request.schema import GenerationBody
from levserve.text.tokenizer import Tokenizer

AnswerKind = TypeVar("AnswerKind", bound=Answer)


def make_answer(
    kind: type[AnswerKind],
    body: GenerationBody,
    model: ServedModel,
    model_name: str,
    prompts: Sequence[Sequence[int]],
    warnings: Sequence[str],
) -> AnswerKind:
    """The `Answer` that makes this request's objects; `model_name` is the name that the client used."""
    return kind(
        model,
        model_name,
        warnings,
        is_function=body.calls_functions,
        shown_prompts=prompts if body.return_token_ids else None,
        num_choices=body.num_choices,
    )


def join_answered(
    body: GenerationBody, choices: Sequence[Choice], gathered: Sequence[Sequence[Delta]]
) -> list[Delta]:
    """One joined delta per answered choice: each prompt's likeliest if more ran than were asked for."""
    answered = rank_choices(choices, body.num_sequences, body.num_choices)
    return [join_deltas(gathered[index]) for index in answered]


def show_prompts(
    body: GenerationBody, prompts: Sequence[Sequence[int]], choices: Sequence[Choice], tokenizer: Tokenizer
) -> list[PromptLogprobs]:
    """Each prompt's scores, which its first choice has; empty if the client did not ask for them."""
    num_top = body.prompt_logprobs
    if num_top is None:
        return []
    scored = zip(prompts, choices[:: body.num_sequences], strict=True)
    return [prompt_logprobs(prompt, choice.prompt_logprobs, num_top, tokenizer) for prompt, choice in scored]
