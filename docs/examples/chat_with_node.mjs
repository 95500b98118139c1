// OpenAI's npm package pointed at levserve: a whole answer, then a streamed one.
//
// npm install openai; OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and which key it wants.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "any",
});
const model = (await client.models.list()).data[0].id;

const answer = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 32,
  temperature: 0,
});
console.log(answer.choices[0].message.content);

const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "Name three colours." }],
  max_tokens: 32,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();
