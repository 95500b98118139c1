"""What every route, field and error means, said once: for /openapi.json and for the documentation's pages.

A test fails if a route, field or error has no sentence here, or a sentence belongs to none of them. The
sentences are Markdown, with links relative to the reference pages.
"""

from __future__ import annotations

ROUTES = {
    "POST /v1/chat/completions": "chat with the model's own template, whole or streamed",
    "POST /v1/completions": "continue texts or token ids, whole or streamed, with `echo`, `best_of` "
    "and `logprobs`",
    "POST /v1/responses": "a chat in OpenAI's newer form, [responses](../how-to/responses.md), "
    "whole or streamed",
    "POST /v1/responses/input_tokens": "how many tokens the prompt of a response has",
    "GET /v1/responses/{id}": "a stored response",
    "DELETE /v1/responses/{id}": "forget a stored response",
    "POST /v1/responses/{id}/cancel": "refused: no response runs in the background",
    "GET /v1/responses/{id}/input_items": "the items that a stored response was made from",
    "POST /v1/messages": "a message of [Anthropic's API](../how-to/anthropic.md), whole or streamed",
    "POST /v1/messages/count_tokens": "how many tokens the prompt of such a message has",
    "POST /v1/embeddings": "the pooled last hidden state",
    "POST /v1/files": "upload the requests of a [batch](../how-to/batches.md#batches-on-the-server), as "
    "`multipart/form-data`",
    "GET /v1/files": "the files that were uploaded, and those with results",
    "GET /v1/files/{id}": "one of the files",
    "DELETE /v1/files/{id}": "delete a file",
    "GET /v1/files/{id}/content": "a file's content",
    "POST /v1/batches": "run the requests of a file at low priority",
    "GET /v1/batches": "the batches",
    "GET /v1/batches/{id}": "a batch's progress and result files",
    "POST /v1/batches/{id}/cancel": "end a batch; results that are there stay",
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
    "GET /metrics/router": "the few metrics by which a [router](metrics.md#the-routers-page) picks a server",
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
    "allowed_token_ids": "the only tokens that may be generated",
    "bad_words": "words that must not be generated; at most 100",
    "best_of": "run so many sequences and return the `n` likeliest; not with `stream`",
    "completion_window": "how long the batch may take, such as `24h` or `7d`; the rest has expired then",
    "chat_template_kwargs": "further variables of the chat template",
    "checkpoint_path": "a Levanter checkpoint to take the weights from",
    "continuations": "a continuation for each prompt, as text or token ids like its prompt",
    "continue_final_message": "let the answer continue the last message",
    "details": "also return each token's log-probability, and whether all were the likeliest",
    "dimensions": "only the model's own number is accepted",
    "echo": "return the prompt before its continuation",
    "encoding_format": "`float` (default) or `base64`",
    "endpoint": "the `url` of every request in the file",
    "frequency_penalty": "subtracted from a logit for each time its token was generated",
    "function_call": "what older clients send for `tool_choice`",
    "functions": "what older clients send for `tools`",
    "grammar": "a grammar in GBNF or Lark",
    "guided_choice": "the answer is one of these texts",
    "guided_grammar": "the same as `grammar`",
    "guided_json": "a JSON schema, as an object or as text",
    "guided_regex": "a regular expression that the whole answer matches",
    "guided_whitespace_pattern": "the white space between the parts of JSON, as an expression",
    "include": "`message.output_text.logprobs` asks for log-probabilities; other values are not read",
    "instructions": "a system message in front; `previous_response_id` does not carry it over",
    "ignore_eos": "go on after the model's end token",
    "include_stop_str_in_output": "keep the stop string in the text",
    "input": "one or several texts, as strings or token ids",
    "input_file_id": "the file with the requests",
    "json_schema": "a JSON schema",
    "logit_bias": "added to the logits of these token ids; at most 300",
    "logprobs": "log-probabilities of the chosen tokens",
    "logprobs_mode": "`raw_logprobs` (default) are the model's own; `processed_logprobs` those of the "
    "distribution that the token was drawn from, after penalties, `logit_bias`, `temperature`, `top_k`, "
    "`top_p` and `min_p`",
    "max_completion_tokens": "the most tokens to generate; wins over `max_tokens`",
    "max_output_tokens": "the most tokens to generate, thoughts included; default: what fits the context",
    "metadata": "up to 16 texts of up to 512 characters that the response repeats",
    "max_tokens": "the most tokens to generate",
    "messages": "the conversation",
    "min_p": "keep tokens at least this likely, relative to the likeliest",
    "min_tokens": "do not stop before so many tokens",
    "mode": "how continuations are scored: `chain_rule`, the default, or `one_pass`, for "
    "[HRM brains](../how-to/hrm.md) only",
    "model": "the name of a served model",
    "n": "choices for each prompt",
    "name": "which loaded model gets the weights; needed where there are several",
    "parallel_tool_calls": "whether one answer may have several calls; default true for models "
    "with a [format for calls](../how-to/tools.md#formats)",
    "output_config": "`format` with a JSON schema that the answer is held to, and `effort`",
    "output_format": "the older place of `output_config.format`",
    "output_expires_after": "`seconds` for which the files with results are kept; default 30 days",
    "pooling": "`mean` (default) or `last`",
    "presence_penalty": "subtracted from the logit of every token that was generated",
    "previous_response_id": "a stored response to go on from: its input and output come first",
    "priority": "requests with a smaller number are served first; default 0",
    "prompt": "what to continue",
    "prompt_logprobs": "log-probabilities of the prompt's tokens and of so many alternatives; "
    "not with `stream`",
    "prompts": "the texts",
    "reasoning": "`effort`: as `reasoning_effort` of a chat, but ignored if the model does not think; "
    "`summary` is not read: thoughts are shown whole",
    "reasoning_effort": "how much the model thinks before it answers; `none` switches it off",
    "repetition_penalty": "divides positive and multiplies negative logits of tokens in prompt or answer",
    "response_format": '`{"type": "json_object"}`, or '
    '`{"type": "json_schema", "json_schema": {"schema": ...}}`',
    "return_token_ids": "also return the token ids: `prompt_token_ids`, and `token_ids` of each choice",
    "return_token_strs": "also return each token as text",
    "revision": "branch, tag or commit on the Hugging Face Hub",
    "seed": "makes sampling [reproducible](../explanation/determinism.md)",
    "skip_special_tokens": "leave special tokens out of the text; default true in answers, "
    "false in `/detokenize`",
    "stop": "strings that end the answer; at most 16",
    "stop_sequences": "strings that end the answer; at most 16",
    "stop_token_ids": "token ids that end the answer; at most 16",
    "stream": "send events as tokens are generated",
    "stream_options": '`{"include_usage": true}` adds a last chunk with the token counts, and '
    "`continuous_usage_stats` beside it shows them so far in every chunk; needs `stream`",
    "structured_outputs": "one of `json`, `regex`, `choice`, `grammar` and `json_object`",
    "suffix": "the text after the one to write; the prompt is the text before it",
    "store": "keep the response for later requests; default true",
    "system": "what the operator says before the conversation, as text or blocks of text",
    "temperature": "0 is greedy; default 1",
    "text": "`format`: `text`, `json_object`, or `json_schema` with its `schema`; `verbosity` is not read",
    "thinking_token_budget": "the most tokens of thoughts; then they are ended",
    "thinking": "`enabled` with `budget_tokens`, `adaptive` or `disabled`, for models that think",
    "timeout": "seconds that the request may take",
    "timings": "add where the time went",
    "tokens": "the token ids",
    "tool_choice": "`none`, `auto` (default), `required`, the function to call, or `allowed_tools`",
    "tools": "functions that the model may call; at most 128",
    "top_k": "keep the k likeliest tokens; 0 or -1 keeps all",
    "top_logprobs": "so many alternatives for each token; needs `logprobs`",
    "top_p": "keep the likeliest tokens that together have this probability; 0 keeps one",
    "truncation": "`auto` keeps the last tokens of an input that is too long; default `disabled`, a refusal",
    "truncate_prompt_tokens": "keep only the last so many tokens of a prompt; -1 keeps as many as fit",
    "user": "accepted and ignored",
}
"""What a field means in every body that has it."""

OWN_FIELDS = {
    "ResponseBody": {
        "input": "a user's text, or a list of items: messages, calls of functions, their results and "
        "thoughts; required without `previous_response_id`",
        "stream_options": "accepted, but not `include_obfuscation: true`; needs `stream`",
        "top_logprobs": "so many alternatives for each token; asks for log-probabilities itself",
        "user": "repeated in the response",
    },
    "BatchBody": {"metadata": "up to 16 texts of up to 512 characters that the batch repeats"},
    "ChatBody": {
        "logprobs": "return log-probabilities of the chosen tokens",
        "max_tokens": "the most tokens to generate; default: what fits the context",
    },
    "CompletionBody": {
        "logprobs": "log-probabilities of the chosen tokens and of so many alternatives",
        "max_tokens": "the most tokens to generate; default 16; 0 with `echo` only scores the prompt",
    },
    "GenerateBody": {
        "max_tokens": "the most tokens to generate; default 128",
        "temperature": "0 is greedy; default 0.7",
        "stream": "must agree with the path",
    },
    "MessageBody": {
        "max_tokens": "the most tokens to generate, cut to what fits the context",
        "metadata": "accepted and ignored",
        "tool_choice": "`auto` (default), `any`, `tool` with its `name`, or `none`, as an object",
        "tools": "tools with `name`, `description` and `input_schema`; at most 128",
        "top_k": "keep the k likeliest tokens; 0 keeps all",
    },
    "PromptBody": {"tool_choice": "as in a message", "tools": "as in a message"},
    "ScoreBody": {
        "prompts": "the texts, or lists of token ids",
        "return_token_ids": "also return the token ids: `prompt_token_ids`, and `token_ids` of the "
        "continuations",
    },
    "TokenizeBody": {"prompt": "what to tokenize"},
    "ReloadBody": {"model": "a model to take the weights from, as `--model` names it"},
}
"""What a field means in a body where it means something else."""

ERRORS = {
    "ServeError": "the server failed to handle the request",
    "Poisoned": "the model computed values that are not finite for this request",
    "BadRequest": "the request is wrong; `param` names the field",
    "ContextTooLong": "prompt and `max_tokens` do not fit the context",
    "Unauthorized": "no key, or a wrong one",
    "Forbidden": "an `/admin` path without an admin key on the server, or a web page from an origin that is "
    "not listed",
    "NotFound": "no such path or thing",
    "ModelNotFound": "no model of that name; the message lists those there are",
    "RequestTimeout": "the client took too long to send its request",
    "Conflict": "the state of the server does not allow it: a reload that does not fit, unloading a model "
    "in use, or deleting a file that a batch reads",
    "BodyTooLarge": "the body is larger than `--max-body-bytes`",
    "UpgradeRequired": "the path is a WebSocket's",
    "Overloaded": "the queue or its tokens are full",
    "Unavailable": "loading, draining, stalled or failed, or no room for the model",
    "DeadlineExceeded": "the request's time ended before its first token",
}


def describe_field(body: str, name: str) -> str:
    return OWN_FIELDS.get(body, {}).get(name) or FIELDS[name]
