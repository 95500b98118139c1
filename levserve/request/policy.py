"""The operator's rules for requests: defaults for what they leave out, and how much one may ask for.

Used on HTTP threads, before a body is made into sequences. Nothing is changed silently: if a client does not
get what it asked for, the request is refused or the answer's `warnings` say so.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from levserve.errors import BadRequest
from levserve.request.schema import GenerationBody
from levserve.settings.settings import Settings


class Permitted(NamedTuple):
    """A body that runs as it is, and sentences about what differs from what the client sent."""

    body: GenerationBody
    warnings: list[str]


class Policy(NamedTuple):
    """The operator's settings about requests to one model; 0 and None leave a value to the API's default."""

    default_max_tokens: int = 0
    default_temperature: float | None = None
    max_new_tokens: int = 0
    refuses_excess: bool = False
    truncates_prompts: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        return cls(
            settings.default_max_tokens,
            settings.default_temperature,
            settings.max_new_tokens,
            settings.max_new_tokens_mode == "refuse",
            settings.truncate_prompts,
        )

    @property
    def open_limit(self) -> int:
        """The most tokens of an answer that may be as long as the context allows; 0 for no limit."""
        return min(filter(None, (self.default_max_tokens, self.max_new_tokens)), default=0)

    def apply_to(self, body: GenerationBody) -> Permitted:
        """Raises `BadRequest` for a body that asks for too many tokens, where that is refused."""
        if self.default_temperature is not None and body.temperature is None:
            body = structs.replace(body, temperature=self.default_temperature)
        field = body.limit_field
        if body.max_length is not None and field is None and self.default_max_tokens:
            body = structs.replace(body, max_tokens=self.default_max_tokens)
        most = self.max_new_tokens
        # Without a length, `prepare` takes the smaller of `open_limit` and what the context holds.
        if not most or body.max_length is None or body.max_length <= most:
            return Permitted(body, [])
        if field is None:  # only a default is lowered: the client gets what it asked for
            return Permitted(structs.replace(body, max_tokens=most), [])
        told = f"'{field}' is {body.max_length}, and this server generates at most {most} tokens for a choice"
        if self.refuses_excess:
            raise BadRequest(f"{told}.", param=field)
        return Permitted(structs.replace(body, **{field: most}), [f"{told}: it counts as {most}."])


NO_POLICY = Policy()
