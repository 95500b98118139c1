// Runs one streamed answer of /v1/chat/completions or /v1/completions: its text, its tokens with their
// probabilities, and how long it took. Used by the chat and the completion tab.

import { stream } from "./api.js";

/**
 * Calls `onPiece(text, tokens, delta)` for each piece of the answer, and returns {finish, usage, timings, ttft,
 * seconds}. `delta` is a chat's, with its thoughts and calls; a completion's is empty.
 * An abort by `signal` or an error throws; `onPiece` has then had everything that arrived.
 */
export async function generate(path, body, signal, onPiece) {
  const began = performance.now();
  const result = { finish: null, usage: null, timings: null, ttft: null, seconds: 0 };
  const asked = { ...body, stream: true, stream_options: { include_usage: true }, timings: true };
  for await (const chunk of stream(path, asked, signal)) {
    result.usage = chunk.usage ?? result.usage;
    result.timings = chunk.timings ?? result.timings;
    const choice = chunk.choices[0];
    if (!choice) continue;
    const delta = choice.delta ?? {};
    const text = choice.text ?? delta.content ?? "";
    const tokens = readTokens(choice.logprobs);
    if (text || tokens.length || delta.reasoning_content || delta.tool_calls) {
      result.ttft ??= (performance.now() - began) / 1000;
      onPiece(text, tokens, delta);
    }
    result.finish = choice.finish_reason ?? result.finish;
  }
  result.seconds = (performance.now() - began) / 1000;
  return result;
}

/** Both shapes of log-probabilities, of a chat and of a completion, as [{text, logprob, top: [{text, logprob}]}]. */
function readTokens(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      top: top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index] ?? {})
      .map(([other, logprob]) => ({ text: other, logprob }))
      .sort((one, other) => other.logprob - one.logprob),
  }));
}

/** One line about an answer: tokens, time to the first token, speed, and why it ended. */
export function describe({ usage, timings, ttft, finish }) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}`);
    parts.push(`${usage.completion_tokens} out`);
  }
  if (ttft != null) parts.push(`TTFT ${seconds(ttft)}`);
  if (timings?.tokens_per_second) parts.push(`${timings.tokens_per_second.toFixed(1)} tok/s`);
  if (finish) parts.push(FINISHES[finish] ?? finish);
  return parts.join(" · ");
}

/** Where the server says the time went, for a tooltip. */
export function describeTimings(timings) {
  if (!timings) return "";
  const phases = ["prepare", "queue", "prefill", "decode"].filter((phase) => timings[`${phase}_ms`] !== undefined);
  return phases.map((phase) => `${phase} ${timings[`${phase}_ms`].toFixed(1)} ms`).join(", ");
}

const FINISHES = { stop: "finished", tool_calls: "calls tools", length: "reached max_tokens", stopped: "stopped by you" };

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}
