"""`levserve chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from levserve.api.model import Model
from levserve.errors import ContextTooLong, ServeError
from levserve.terminal.answer import Answer
from levserve.terminal.options import (
    add_model,
    add_sampling,
    make_parser,
    open_with_progress,
    sampling_of,
    text,
)
from levserve.terminal.screen import hint
from levserve.terminal.streams import as_utf8, require_stdin

DESCRIPTION = """\
A conversation with a model.

  levserve chat                           with the bundled model, at once
  levserve chat Qwen/Qwen3-0.6B           with a model of the Hugging Face Hub
  levserve chat ./my-model --temperature 0 --system "Answer in one sentence."

Ctrl-C stops an answer, Ctrl-D leaves. /help lists what else can be typed.
"""
HELP = """\
/new, /clear     forget the conversation
/system TEXT     tell the model how to behave, from the start of a new conversation
/undo            remove the last question and its answer
/help            this text
/quit, Ctrl-D    leave
Ctrl-C           stops an answer"""
MAKE_ROOM = "/undo or /new makes room in a full context"
PROMPT = "> "


class Conversation:
    """The messages so far; all of them are sent with each question."""

    def __init__(self, model: Model, fields: dict[str, Any], system: str = "") -> None:
        self._model = model
        self._fields = fields
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def obey(self, line: str) -> bool:
        """Runs a command that begins with a slash; returns False to end the conversation."""
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command in ("/new", "/clear"):
            self.forget()
        elif command == "/system":
            self._system = rest.strip()
            self.forget()
        elif command == "/undo":
            self._undo()
        elif command == "/help":
            print(HELP)
        else:
            print(f"unknown command {command}; the commands are\n{HELP}", file=sys.stderr)
        return True

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. What Ctrl-C cuts off stays in the conversation as it is."""
        self.messages.append({"role": "user", "content": question})
        answer = Answer()
        try:
            with self._model.stream_chat(self.messages, **self._fields) as stream:
                answer.write(stream)
        except KeyboardInterrupt:
            print(" ...", end="")
        except ServeError as error:
            if answer.text:
                print(flush=True)
            print(error.message, file=sys.stderr)
            self.messages.pop()
            if isinstance(error, ContextTooLong) and self._has_question():
                hint(MAKE_ROOM)
            return
        print(flush=True)
        is_set = "max_tokens" in self._fields
        answer.explain_end("--max-tokens sets it" if is_set else f"--max-tokens sets one, {MAKE_ROOM}")
        self.messages.append({"role": "assistant", "content": answer.text})

    def _undo(self) -> None:
        """Removes the last question and its answer; the system prompt stays."""
        if not self._has_question():
            print("there is no question to take back", file=sys.stderr)
            return
        while self.messages.pop()["role"] != "user":
            pass

    def _has_question(self) -> bool:
        return any(message["role"] == "user" for message in self.messages)


def main(argv: Sequence[str]) -> int:
    parser = make_parser("chat", DESCRIPTION)
    add_model(parser, "Model to talk to, given as for levserve. [default: the bundled model]")
    parser.add_argument(
        "--system", type=text, default="", metavar="TEXT", help="System prompt: how the model is to behave."
    )
    add_sampling(parser, max_tokens="as many as fit the context")
    options = parser.parse_args(argv)
    require_stdin()
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` its history and its keys)
    with open_with_progress(options) as model:
        conversation = Conversation(model, sampling_of(options), options.system)
        if sys.stdin.isatty():
            print(f"{model.name}: Ctrl-C stops an answer, Ctrl-D leaves, /help for more.")
        talk(conversation)
    return 0


def talk(conversation: Conversation) -> None:
    """Reads lines until the end of the input."""
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            line = as_utf8(line)
        except ValueError:
            print("this line is not UTF-8 text", file=sys.stderr)
            continue
        if line.startswith("/"):
            if not conversation.obey(line):
                return
        elif line:
            conversation.ask(line)
