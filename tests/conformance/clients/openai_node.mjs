// OpenAI's own client for JavaScript.
import OpenAI from "openai";
import { check, expect, model, question, url, word } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: question }];
const chat = { model, messages, temperature: 0, max_tokens: 60 };
const parameters = { type: "object", properties: { minutes: { type: "integer" } }, required: ["minutes"] };
const timer = { name: "set_timer", description: "Set a timer in minutes.", parameters };
const timerQuestion = "Set a timer for 45 minutes.";

await check("models", async () => {
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  expect(names.includes(model), "the model is listed");
});

await check("chat", async () => {
  const answer = await client.chat.completions.create(chat);
  expect(answer.choices[0].message.content.includes(word), "the answer");
  expect(answer.usage.total_tokens > 0, "usage");
});

await check("streamed chat with usage", async () => {
  const stream = await client.chat.completions.create({
    ...chat,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  expect(text.includes(word), "the answer");
  expect(usage?.completion_tokens > 0, "usage");
});

await check("its stream helper", async () => {
  const final = await client.chat.completions.stream(chat).finalChatCompletion();
  expect(final.choices[0].message.content.includes(word), "the answer");
});

await check("tool call, streamed", async () => {
  const runner = client.chat.completions.stream({
    ...chat,
    max_tokens: 160,
    messages: [{ role: "user", content: timerQuestion }],
    tools: [{ type: "function", function: timer }],
  });
  const call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
  expect(JSON.parse(call.function.arguments).minutes === 45, "the arguments");
});

await check("a tool's round trip by its runner", async () => {
  let asked = null;
  const set = (given) => ((asked = given.minutes), "started");
  const runner = client.chat.completions.runTools(
    {
      ...chat,
      max_tokens: 160,
      messages: [{ role: "user", content: timerQuestion }],
      tools: [{ type: "function", function: { ...timer, function: set, parse: JSON.parse } }],
    },
    { maxChatCompletions: 3 },
  );
  await runner.done().catch(() => null); // the small model may call for ever
  expect(asked === 45, "the function was called");
});

await check("response", async () => {
  const answer = await client.responses.create({ model, input: question, temperature: 0 });
  expect(answer.output_text.includes(word), "the answer");
});

await check("streamed response", async () => {
  const stream = client.responses.stream({ model, input: question, temperature: 0 });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  const final = await stream.finalResponse();
  expect(final.output_text.includes(word), "the answer");
  expect(kinds.at(-1) === "response.completed", "the last event");
});

await check("an aborted stream", async () => {
  const stream = await client.chat.completions.create({ ...chat, max_tokens: 400, stream: true });
  for await (const chunk of stream) {
    stream.controller.abort();
    break;
  }
  expect((await client.chat.completions.create(chat)).choices.length === 1, "it still answers");
});

await check("failures are its own classes", async () => {
  const error = await client.chat.completions.create({ ...chat, temperature: 9 }).catch((caught) => caught);
  expect(error instanceof OpenAI.BadRequestError && error.param === "temperature", "a bad request");
});
