"""The kinds of servers that `ab.py` can ask: how a request to each is written, and how its answers are read.

A kind turns an `Ask` into a request body of its own API, and every event or whole answer into a `Piece`.
Samplers that a server would apply by default, such as llama.cpp's top_k of 40, are turned off in the
request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENDINGS = {
    "eos_token": "stop",
    "stop_sequence": "stop",
    "eos": "stop",
    "word": "stop",
    "limit": "length",
}
"""What TGI and llama.cpp call the reasons that OpenAI calls stop and length."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One question in the words of /v1/completions."""

    prompt: str
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = True


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream adds, or a whole answer."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """`spell` makes a body from a question, the model's name and whether to stream; `read` reads answers."""

    name: str
    stream_path: str
    whole_path: str
    spell: Callable[[Ask, str, bool], dict[str, Any]]
    read: Callable[[dict[str, Any]], Piece]
    needs_model: bool = True
    lacks: frozenset[str] = frozenset()
    """Fields of a question that this kind does not support."""


def spell_openai(ask: Ask, model: str, is_streamed: bool) -> dict[str, Any]:
    """What OpenAI's own API takes."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "seed": ask.seed,
    }
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.logprobs:
        body["logprobs"] = 1  # 0 would do for levserve and vLLM, and means none elsewhere
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def spell_vllm(ask: Ask, model: str, is_streamed: bool) -> dict[str, Any]:
    """OpenAI's, with the fields that vLLM added and levserve has as well."""
    body = spell_openai(ask, model, is_streamed)
    if ask.top_k:
        body["top_k"] = ask.top_k
    if ask.ignore_eos:
        body["ignore_eos"] = True
    return body


def spell_llama_cpp_python(ask: Ask, model: str, is_streamed: bool) -> dict[str, Any]:
    """OpenAI's, and llama.cpp's own samplers turned off."""
    own = {"top_k": ask.top_k, "min_p": 0.0, "repeat_penalty": 1.0}
    return spell_openai(ask, model, is_streamed) | own


def read_openai(answer: dict[str, Any]) -> Piece:
    usage = answer.get("usage") or {}
    prompt_tokens, completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not answer["choices"]:
        return Piece(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    choice = answer["choices"][0]
    listed = choice.get("logprobs") or {}
    pairs = zip(listed.get("tokens") or (), listed.get("token_logprobs") or ())
    tokens = tuple(Token(text, logprob) for text, logprob in pairs)
    return Piece(choice["text"], tokens, choice.get("finish_reason"), prompt_tokens, completion_tokens)


def spell_tgi(ask: Ask, model: str, is_streamed: bool) -> dict[str, Any]:
    """TGI has a field for whether to sample; it refuses a temperature of 0 and a top_p of 1."""
    parameters: dict[str, Any] = {
        "max_new_tokens": ask.max_tokens,
        "do_sample": ask.temperature > 0,
        "seed": ask.seed,
        "details": True,
    }
    if ask.temperature > 0:
        parameters["temperature"] = ask.temperature
    if ask.top_p < 1:
        parameters["top_p"] = ask.top_p
    if ask.top_k:
        parameters["top_k"] = ask.top_k
    if ask.stop:
        parameters["stop"] = list(ask.stop)
    return {"inputs": ask.prompt, "parameters": parameters}


def read_tgi(answer: dict[str, Any]) -> Piece:
    """An event has one token, the last one also details; a whole answer has text, and details with all
    tokens."""
    details = answer.get("details") or {}
    finish = details.get("finish_reason")
    if "token" in answer:
        token = answer["token"]
        text = "" if token["special"] else token["text"]
        tokens: tuple[Token, ...] = (Token(token["text"], token["logprob"]),)
    else:
        text = answer["generated_text"]
        tokens = tuple(Token(token["text"], token["logprob"]) for token in details.get("tokens", ()))
    return Piece(
        text, tokens, name_ending(finish), details.get("input_length"), details.get("generated_tokens")
    )


def spell_llama_cpp(ask: Ask, model: str, is_streamed: bool) -> dict[str, Any]:
    return {
        "prompt": ask.prompt,
        "n_predict": ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "seed": ask.seed,
        "stop": list(ask.stop),
        "ignore_eos": ask.ignore_eos,
        "n_probs": 1 if ask.logprobs else 0,
        "stream": is_streamed,
    }


def read_llama_cpp(answer: dict[str, Any]) -> Piece:
    listed = answer.get("completion_probabilities") or ()
    tokens = tuple(Token(token["token"], token["logprob"]) for token in listed)
    if not answer.get("stop"):
        return Piece(answer["content"], tokens)
    finish = name_ending(answer.get("stop_type")) or "stop"
    return Piece(
        answer["content"], tokens, finish, answer.get("tokens_evaluated"), answer.get("tokens_predicted")
    )


def name_ending(reason: str | None) -> str | None:
    """The finish reason as OpenAI calls it."""
    return None if reason is None else ENDINGS.get(reason, reason)


OPENAI_PATH = "/v1/completions"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("levserve", OPENAI_PATH, OPENAI_PATH, spell_vllm, read_openai),
        Kind("vllm", OPENAI_PATH, OPENAI_PATH, spell_vllm, read_openai),
        Kind(
            "tgi",
            "/generate_stream",
            "/generate",
            spell_tgi,
            read_tgi,
            needs_model=False,
            lacks=frozenset({"ignore_eos"}),
        ),
        Kind("llama.cpp", "/completion", "/completion", spell_llama_cpp, read_llama_cpp, needs_model=False),
        Kind(
            "llama-cpp-python",
            OPENAI_PATH,
            OPENAI_PATH,
            spell_llama_cpp_python,
            read_openai,
            lacks=frozenset({"ignore_eos"}),
        ),
        Kind(
            "openai",
            OPENAI_PATH,
            OPENAI_PATH,
            spell_openai,
            read_openai,
            lacks=frozenset({"ignore_eos", "top_k"}),
        ),
    )
}
