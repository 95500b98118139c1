"""A chat over levserve's WebSocket: each answer comes in frames, on one connection.

pip install simple-websocket; OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and which key it wants.
"""

import json
import os

from simple_websocket import Client

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").replace("http", "ws", 1)
key = os.environ.get("OPENAI_API_KEY", "any")
model = "smollm2-135m"
socket = Client.connect(f"{url}/ws", headers={"Authorization": f"Bearer {key}"})

messages = []
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    fields = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0}
    socket.send(json.dumps({"path": "/v1/chat/completions", **fields}))
    answer = ""
    while (frame := socket.receive(timeout=60)) not in (None, "[DONE]"):
        chunk = json.loads(frame)
        if "error" in chunk:
            raise SystemExit(chunk["error"]["message"])
        text = chunk["choices"][0]["delta"].get("content") or ""
        answer += text
        print(text, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})
socket.close()
