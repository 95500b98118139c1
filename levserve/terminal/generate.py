"""`levserve generate`: continues a prompt and writes the text as it comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from levserve.errors import ConfigError
from levserve.terminal.answer import Answer
from levserve.terminal.options import add_sampling, make_parser, open_with_progress, sampling_of, text
from levserve.terminal.streams import as_utf8, require_stdin

DESCRIPTION = """\
Continues a prompt, or answers it as a chat.

  levserve generate "The capital of France is"
  levserve generate --chat "Name three rivers" --model Qwen/Qwen3-0.6B
  cat letter.txt | levserve generate - --temperature 0 --max-tokens 200

Only the text goes to stdout; what a model thinks before its answer goes to stderr.
"""
DEFAULT_MAX_TOKENS = 128


def main(argv: Sequence[str]) -> int:
    parser = make_parser("generate", DESCRIPTION)
    parser.add_argument("prompt", type=text, help="The text; - reads it from stdin.")
    parser.add_argument(
        "--model", metavar="NAME", help="Model to use, given as for levserve. [default: the bundled model]"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Send the text as a question in a chat, with the model's chat template.",
    )
    add_sampling(parser, max_tokens=str(DEFAULT_MAX_TOKENS))
    options = parser.parse_args(argv)
    prompt = _read_stdin() if options.prompt == "-" else options.prompt
    fields = {"max_tokens": DEFAULT_MAX_TOKENS} | sampling_of(options)
    with open_with_progress(options) as model:
        if options.chat:
            stream = model.stream_chat([{"role": "user", "content": prompt}], **fields)
        else:
            stream = model.stream(prompt, **fields)
        answer = Answer()
        with stream:
            answer.write(stream)
    print(flush=True)
    if options.chat:  # a continuation has no end of its own, so a limit is what ends it
        answer.explain_end("--max-tokens sets it")
    return 0


def _read_stdin() -> str:
    require_stdin()
    try:
        return as_utf8(sys.stdin.read())
    except ValueError:
        raise ConfigError("stdin is not UTF-8 text") from None
