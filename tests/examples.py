"""The programs under docs/examples, and how the tests run each."""

from __future__ import annotations

import sys

from tests.documents import ROOT

EXAMPLES = ROOT / "docs" / "examples"
COMMANDS = {
    "chat_with_openai.py": [sys.executable],
    "chat_with_requests.py": [sys.executable],
    "chat_over_websocket.py": [sys.executable],
    "chat_with_curl.sh": ["bash"],
    "chat_with_node.mjs": ["node"],
}
"""The examples that every test run can run."""
HEAVY = {"chat_with_langchain.py": "langchain-openai>=1", "chat_with_litellm.py": "litellm>=1.80"}
"""The examples that need a large install, with the package that each needs."""
RAY = {"ray_serve.py": "ray[serve]>=2.50,<3"}
"""The example that starts servers itself; it has its own test and its own page."""


def client_environ(url: str) -> dict[str, str]:
    """The environment variables by which the examples find the server."""
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "any"}
