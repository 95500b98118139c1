"""The command line of `ab.py`: which servers, which questions."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from http_client import Address
from kinds import KINDS, Ask, Kind
from load_options import list_of
from prompts import UnreadableDataset, read_dataset

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius because",
    "Three colours of the rainbow are",
    "Dear Sir or Madam,\n\n",
    '{"name": "Ada", "born":',
    "Question: What is 12 times 12?\nAnswer:",
)
EPILOG = """\
examples:
  python bench/ab.py levserve=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001 tgi=http://127.0.0.1:8002
  python bench/ab.py int8:levserve=http://127.0.0.1:8000 bf16:levserve=http://127.0.0.1:8001 --max-tokens 128
  python bench/ab.py levserve=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8080 --temperature 0.8 --seeds 1,2,3 --json ab.json

a server is [NAME:]KIND=URL; the first one is what the others are compared with. Kinds, and what each is asked:
  levserve, vllm     POST /v1/completions
  tgi                POST /generate_stream, or /generate with --no-stream; knows no ignore_eos
  llama.cpp          POST /completion of llama-server
  llama-cpp-python   POST /v1/completions of python -m llama_cpp.server; knows no ignore_eos, and log-probabilities only with
                     --logits_all true
  openai             POST /v1/completions with OpenAI's own fields alone

what the numbers mean: answers are the same when their texts are. Servers draw with generators of their own: at a temperature above 0
the same seed gives the same text only from the same kind of server. Log-probabilities are compared for tokens that both chose before
they part. Times are those of `load.py --help`, of one request at a time; the first of them may pay for a connection.

exit code: 0 every question was answered, 1 some were not or a server names no model, 2 wrong usage, 130 Ctrl-C (prints what it has).
"""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    kind: Kind
    address: Address
    model: str = ""


def parse(argv: Sequence[str] | None, about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ab.py",
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("servers", nargs="+", metavar="[NAME:]KIND=URL", help="at least two; kinds: " + ", ".join(KINDS))
    add("--model", action="append", default=[], metavar="NAME=MODEL", help="default: first of GET /v1/models")
    add("--api-key", action="append", default=[], metavar="NAME=KEY", help="sent as a bearer token")
    add("--prompt", action="append", metavar="TEXT", help="ask this; may be given more than once")
    add("--dataset", metavar="FILE", help="ask the prompts of a file, as `load.py --help` describes it")
    add("--num-prompts", type=int, metavar="N", help="only the first so many")
    add("--max-tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P", help="default: %(default)s")
    add("--top-k", type=int, default=0, metavar="K", help="0 keeps all tokens (default: %(default)s)")
    add("--seeds", type=list_of(int), default=[0], metavar="N,N", help="ask with each (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="a string that ends an answer")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    add("--logprobs", action=argparse.BooleanOptionalAction, default=True, help="ask for log-probabilities")
    add("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream, or take answers whole")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds (default: %(default)s)")
    add(
        "--width",
        type=int,
        default=110,
        metavar="N",
        help="characters of a text; 0: all (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="write everything here too; - is stdout")
    options = parser.parse_args(argv)
    least = {"max_tokens": 1, "temperature": 0, "top_k": 0, "width": 0, "num_prompts": 1, "timeout": 1e-3}
    for name, value in least.items():
        given = getattr(options, name)
        if given is not None and not given >= value:
            parser.error(f"--{name.replace('_', '-')} {given} is below {value}")
    if not 0 < options.top_p <= 1:
        parser.error(f"--top-p {options.top_p} is not above 0 and at most 1")
    if min(options.seeds) < 0:
        parser.error(f"--seeds {min(options.seeds)} is below 0, and TGI refuses that")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json {options.json}: no such folder")
    options.prompts = read_prompts(parser, options)
    options.servers = make_servers(parser, options)
    return options


def read_prompts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.prompt and options.dataset:
        parser.error("--prompt and --dataset both say what to ask: give one of them")
    prompts = options.prompt or list(PROMPTS)
    if options.dataset:
        try:
            prompts = [prompt.text for prompt in read_dataset(options.dataset)]
        except (OSError, UnreadableDataset) as error:
            parser.error(f"--dataset {options.dataset}: {getattr(error, 'strerror', None) or error}")
    return prompts[: options.num_prompts]


def make_servers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Server]:
    servers: list[Server] = []
    for given in options.servers:
        label, separator, url = given.partition("=")
        name, _, kind = label.rpartition(":")
        if not separator or kind not in KINDS:
            parser.error(f"{given}: write [NAME:]KIND=URL, KIND one of {', '.join(KINDS)}")
        if not url.startswith(("http://", "https://")):
            parser.error(f"{given}: the URL does not start with http:// or https://")
        servers.append(Server(number_name(name or kind, servers), KINDS[kind], Address(url)))
    if len(servers) < 2:
        parser.error("give at least two servers; the same one twice shows whether it repeats itself")
    models = read_pairs(parser, "--model", options.model, servers)
    keys = read_pairs(parser, "--api-key", options.api_key, servers)
    return [
        Server(
            server.name,
            server.kind,
            Address(server.address.url, keys.get(server.name), options.timeout),
            models.get(server.name, ""),
        )
        for server in servers
    ]


def number_name(name: str, servers: Sequence[Server]) -> str:
    taken = {server.name for server in servers}
    numbered = (f"{name} {number}" for number in itertools.count(2))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def read_pairs(
    parser: argparse.ArgumentParser, flag: str, pairs: Sequence[str], servers: Sequence[Server]
) -> dict[str, str]:
    names = [server.name for server in servers]
    found = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if name not in names or not separator or not value:
            parser.error(f"{flag} takes NAME=VALUE, NAME one of {', '.join(names)}")
        found[name] = value
    return found


def make_asks(options: argparse.Namespace) -> list[Ask]:
    return [
        Ask(
            prompt,
            options.max_tokens,
            options.temperature,
            options.top_p,
            options.top_k,
            seed,
            tuple(options.stop),
            options.ignore_eos,
            options.logprobs,
        )
        for prompt in options.prompts
        for seed in options.seeds
    ]
