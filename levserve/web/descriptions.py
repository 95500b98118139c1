"""What every route, field and error means, said once: for /openapi.json and for the documentation's pages.

One without a sentence here, or a sentence without its thing, fails a test. The sentences are Markdown, with
links as the reference pages have them.
"""

from __future__ import annotations

ROUTES = {
    "POST /v1/chat/completions": "chat with the model's own template, whole or streamed",
    "POST /v1/completions": "continue texts or token ids, whole or streamed, with `echo`, `best_of` "
    "and `logprobs`",
    "POST /v1/embeddings": "the pooled last hidden state",
    "GET /v1/models": "the served models, loaded and loadable",
    "GET /v1/models/{id}": "one of the served models",
    "GET /v1/ws": "chat and completions over a [WebSocket](websocket.md)",
    "POST /generate": "a list of prompts to a list of texts, for scripts",
    "POST /generate_stream": "what `/generate` does, as a stream of events",
    "POST /loglikelihood": "score continuations of prompts",
    "POST /tokenize": "a text or a conversation to token ids; also under `/v1`",
    "POST /detokenize": "token ids to text; also under `/v1`",
    "POST /apply_template": "messages as the chat template writes them; also under `/v1`",
    "GET /tokenizer_info": "special tokens, vocabulary size and chat template; also under `/v1`",
    "GET /healthz": "200 while the process is alive and its device thread moves",
    "GET /health": "what `/healthz` says, versions, the device and its memory, and the loaded models",
    "GET /readyz": "200 once the model is loaded, compiled and warm; before that 503 with the progress",
    "GET /metrics": "[metrics](metrics.md) for Prometheus",
    "POST /admin/reload": "newer weights of the same shape",
    "GET /admin/stats": "the device, and memory, pages and requests of each model",
    "POST /admin/load/{id}": "load a model, and answer when it is loaded",
    "POST /admin/unload/{id}": "unload a model that is not in use",
    "GET /": "a [page](../how-to/browser-page.md) for browsers; for other clients name, version and paths",
    "GET /openapi.json": "this API in OpenAPI 3.1, for programs",
    "GET /docs": "this API as a [page](../how-to/browser-page.md#the-api) for people",
    "GET /static/{id}": "the pages' files",
}

FIELDS = {
    "add_generation_prompt": "begin an assistant's message after the conversation; default true",
    "add_special_tokens": "add what the tokenizer adds, such as bos; default true",
    "allowed_token_ids": "the only tokens that may be written",
    "bad_words": "words that are not written; at most 100",
    "best_of": "run so many sequences and return the `n` likeliest; not with `stream`",
    "chat_template_kwargs": "further variables of the chat template",
    "checkpoint_path": "a Levanter checkpoint to take the weights from",
    "continuations": "a continuation for each prompt",
    "continue_final_message": "let the answer continue the last message",
    "details": "also return each token's log-probability, and whether all were the likeliest",
    "dimensions": "only the model's own number is accepted",
    "echo": "return the prompt before its continuation",
    "encoding_format": "`float` (default) or `base64`",
    "frequency_penalty": "subtracted from a logit for each time its token was generated",
    "function_call": "what older clients send for `tool_choice`",
    "functions": "what older clients send for `tools`",
    "grammar": "a grammar in GBNF or Lark",
    "guided_choice": "the answer is one of these texts",
    "guided_grammar": "the same as `grammar`",
    "guided_json": "a JSON schema, as an object or as text",
    "guided_regex": "a regular expression that the whole answer matches",
    "guided_whitespace_pattern": "the white space between the parts of JSON, as an expression",
    "ignore_eos": "go on after the model's end token",
    "include_stop_str_in_output": "keep the stop string in the text",
    "input": "one or several texts, as strings or token ids",
    "json_schema": "a JSON schema",
    "logit_bias": "added to the logits of these token ids; at most 300",
    "logprobs": "log-probabilities of the chosen tokens",
    "max_completion_tokens": "the most tokens to generate; wins over `max_tokens`",
    "max_tokens": "the most tokens to generate",
    "messages": "the conversation",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "min_tokens": "do not stop before so many tokens",
    "model": "the name of a served model",
    "n": "choices for each prompt",
    "name": "which loaded model gets the weights; needed where there are several",
    "parallel_tool_calls": "whether one answer may have several calls; default true",
    "pooling": "`mean` (default) or `last`",
    "presence_penalty": "subtracted from the logit of every token that was generated",
    "prompt": "what to continue or tokenize",
    "prompt_logprobs": "log-probabilities of the prompt's tokens and of so many alternatives; "
    "not with `stream`",
    "prompts": "the texts",
    "reasoning_effort": "how much the model thinks before it answers; `none` switches it off",
    "repetition_penalty": "divides positive and multiplies negative logits of tokens in prompt or answer",
    "response_format": '`{"type": "json_object"}`, or '
    '`{"type": "json_schema", "json_schema": {"schema": ...}}`',
    "return_token_strs": "also return each token as text",
    "revision": "branch, tag or commit on the Hugging Face Hub",
    "seed": "makes the draws [reproducible](../explanation/determinism.md)",
    "skip_special_tokens": "leave special tokens out of the text; default true in answers, "
    "false in `/detokenize`",
    "stop": "strings that end the answer; at most 16",
    "stop_token_ids": "token ids that end the answer; at most 16",
    "stream": "send events as tokens are generated",
    "stream_options": '`{"include_usage": true}` adds a last chunk with the token counts; needs `stream`',
    "structured_outputs": "one of `json`, `regex`, `choice`, `grammar` and `json_object`",
    "temperature": "0 is greedy; default 1",
    "thinking_token_budget": "the most tokens of thoughts; then they are ended",
    "timeout": "seconds that the request may take",
    "timings": "add where the time went",
    "tokens": "the token ids",
    "tool_choice": "`none`, `auto` (default), `required`, the function to call, or `allowed_tools`",
    "tools": "functions that the model may call; at most 128",
    "top_k": "keep the k likeliest tokens; 0 or -1 keeps all",
    "top_logprobs": "so many alternatives for each token; needs `logprobs`",
    "top_p": "keep the likeliest tokens that together have this probability",
    "truncate_prompt_tokens": "keep only the last so many tokens of a prompt; -1 keeps as many as fit",
    "user": "accepted and not read",
}
"""What a field means, in whatever body it stands."""

OWN_FIELDS = {
    ("ChatBody", "logprobs"): "return log-probabilities of the chosen tokens",
    ("CompletionBody", "logprobs"): "log-probabilities of the chosen tokens and of so many alternatives",
    (
        "CompletionBody",
        "max_tokens",
    ): "the most tokens to generate; default 16; 0 with `echo` only scores the prompt",
    ("ChatBody", "max_tokens"): "the most tokens to generate; default: what fits the context",
    ("GenerateBody", "max_tokens"): "the most tokens to generate; default 128",
    ("GenerateBody", "temperature"): "0 is greedy; default 0.7",
    ("GenerateBody", "stream"): "must agree with the path",
    ("ReloadBody", "model"): "a model to take the weights from, as `--model` names it",
}
"""Where it means something else."""

ERRORS = {
    "ServeError": "the server failed to handle the request",
    "Poisoned": "the model computed numbers that are not finite for this request",
    "BadRequest": "the request is wrong; `param` names the field",
    "ContextTooLong": "prompt and `max_tokens` do not fit the context",
    "Unauthorized": "no key, or a wrong one",
    "Forbidden": "an `/admin` path without an admin key on the server, or a web page from an origin that is "
    "not listed",
    "NotFound": "no such path or thing",
    "ModelNotFound": "no model of that name; the message lists those there are",
    "RequestTimeout": "the client took too long to send its request",
    "Conflict": "the state of the server does not allow it: a reload that does not fit, or unloading a model "
    "in use",
    "BodyTooLarge": "the body is larger than `--max-body-bytes`",
    "UpgradeRequired": "the path is a WebSocket's",
    "Overloaded": "the queue or its tokens are full",
    "Unavailable": "loading, draining, stalled or failed, or no room for the model",
    "DeadlineExceeded": "the request's time ended before its first token",
}
