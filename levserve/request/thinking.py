"""How one chat thinks: what its fields ask of the template, and what that means for its answer.

Called on HTTP threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from levserve.engine.served_model import ServedModel
from levserve.errors import BadRequest
from levserve.request.decode import require_choice
from levserve.request.schema import ChatBody, GenerationBody
from levserve.schedule.constraint import Constraint
from levserve.text.parts import PartReader
from levserve.text.reasoning import Begun, Reasoning

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thoughts of a request's answers; empty for a model that does not think."""

    reasoning: Reasoning | None = None
    vocab_rows: int = 0
    begun: Begun = Begun.CLOSED
    budget: int | None = None
    """The most tokens of thoughts."""

    def constrain(self, answer: Constraint | None) -> Constraint | None:
        """The constraint on thoughts and answer together; the one on the answer begins after the thoughts."""
        if self.reasoning is None:
            return answer
        return self.reasoning.constrain(self.begun, answer, self.vocab_rows, self.budget)

    def make_reader(self, answer: PartReader | None) -> PartReader | None:
        """A reader that separates the thoughts from what `answer` reads."""
        return answer if self.reasoning is None else self.reasoning.make_reader(self.begun, answer)

    @property
    def visible(self) -> frozenset[int]:
        """The special tokens that a reader has to see."""
        return frozenset() if self.reasoning is None else self.reasoning.visible


def template_kwargs(body: ChatBody, model: ServedModel) -> dict[str, Any] | None:
    """The template's variables, with what `reasoning_effort` asks for; `chat_template_kwargs` wins."""
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs
    require_choice(effort, EFFORTS, "reasoning_effort")
    if model.reasoning is None:
        if effort == "none" or body.may_lack_thoughts:
            return body.chat_template_kwargs
        raise _cannot_think("reasoning_effort")
    return {**model.reasoning.ask_for(effort), **(body.chat_template_kwargs or {})}


def find_thinking(body: GenerationBody, model: ServedModel, prompts: list[list[int]]) -> Thinking:
    """How the answers to a chat's rendered prompt think; raises `BadRequest`."""
    if not isinstance(body, ChatBody):
        return Thinking()
    if model.reasoning is None:
        if body.thinking_token_budget is not None and not body.may_lack_thoughts:
            raise _cannot_think("thinking_token_budget")
        return Thinking()
    (prompt,) = prompts
    begun = model.reasoning.look_at(prompt)
    if body.continue_final_message:
        begun = model.reasoning.look_at_message(body.messages[-1].to_template()["content"] or "")
    return Thinking(model.reasoning, model.grammars.vocab_rows, begun, _budget(body, model.reasoning))


def _cannot_think(param: str) -> BadRequest:
    message = f"Thinking is not available for this model; leave '{param}' out."
    return BadRequest(message, param=param)


def _budget(body: ChatBody, reasoning: Reasoning) -> int | None:
    """A budget of 0 switches thinking off where the template cannot."""
    is_off = body.reasoning_effort == "none" and reasoning.switch is None
    return 0 if is_off else body.thinking_token_budget
