"""Plain HTTP with requests: a whole answer, then the events of a stream as they come.

pip install requests; OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and which key it wants.
"""

import json
import os

import requests

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
session = requests.Session()
session.headers["Authorization"] = "Bearer " + os.environ.get("OPENAI_API_KEY", "any")
model = session.get(f"{url}/models", timeout=10).json()["data"][0]["id"]

body = {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
answer = session.post(f"{url}/completions", json=body, timeout=60)
answer.raise_for_status()
print(answer.json()["choices"][0]["text"])

with session.post(f"{url}/completions", json=body | {"stream": True}, stream=True, timeout=60) as events:
    events.raise_for_status()
    for line in events.iter_lines():
        data = line.removeprefix(b"data: ")
        if line.startswith(b"data: ") and data != b"[DONE]":
            print(json.loads(data)["choices"][0]["text"], end="", flush=True)
print()
