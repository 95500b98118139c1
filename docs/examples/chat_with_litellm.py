"""LiteLLM pointed at levserve: the prefix `openai/` means any OpenAI-compatible server at `api_base`.

pip install litellm; OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and which key it wants.
"""

import os

import litellm

server = {
    "model": "openai/smollm2-135m",
    "api_base": os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    "api_key": os.environ.get("OPENAI_API_KEY", "any"),
}

question = [{"role": "user", "content": "What is the capital of France?"}]
answer = litellm.completion(messages=question, max_tokens=32, temperature=0, **server)
print(answer.choices[0].message.content)

for chunk in litellm.completion(messages=question, max_tokens=32, stream=True, **server):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

vectors = litellm.embedding(input=["a cat", "a dog"], **server)
print(len(vectors.data), "embeddings")
