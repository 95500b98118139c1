#!/usr/bin/env bash
# curl and nothing else: a whole answer, a stream, a list of prompts and a score.
# OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and which key it wants.
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
model=smollm2-135m

ask() {  # path, body
    curl -sS --fail-with-body -N "${url%/v1}$1" -H "Authorization: Bearer ${OPENAI_API_KEY:-any}" \
        -H 'Content-Type: application/json' -d "$2"
    echo
}

question='[{"role": "user", "content": "What is the capital of France?"}]'
ask /v1/chat/completions '{"model": "'"$model"'", "messages": '"$question"', "max_tokens": 32, "temperature": 0}'
ask /v1/chat/completions '{"model": "'"$model"'", "messages": '"$question"', "max_tokens": 32, "stream": true}'
ask /generate '{"prompts": ["Once upon a time", "Hello"], "max_tokens": 8}'
ask /loglikelihood '{"prompts": ["2 + 2 ="], "continuations": [" 4"]}'
