// Vercel's AI SDK, by its provider for compatible servers and by the one for OpenAI's responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { check, expect, model, question, url, word } from "./checks.mjs";

const { generateText, jsonSchema, Output, streamText, tool } = ai;
const compatible = createOpenAICompatible({
  name: "dflash",
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const schema = { type: "object", properties: { minutes: { type: "integer" } }, required: ["minutes"] };
const stop = (ai.isStepCount ?? ai.stepCountIs)(2);

function timer() {
  const asked = [];
  const execute = async ({ minutes }) => (asked.push(minutes), "started");
  const description = "Set a timer in minutes.";
  return { asked, tools: { set_timer: tool({ description, inputSchema: jsonSchema(schema), execute }) } };
}

for (const [name, chosen] of [
  ["chat", compatible(model)],
  ["completion", compatible.completionModel(model)],
  ["response", openai.responses(model)],
]) {
  await check(`${name}: generateText`, async () => {
    const answer = await generateText({ model: chosen, prompt: question, temperature: 0, maxOutputTokens: 60 });
    if (name !== "completion") expect(answer.text.includes(word), "the answer");
    expect(answer.usage.outputTokens > 0, "usage");
  });

  await check(`${name}: streamText`, async () => {
    const answer = streamText({ model: chosen, prompt: question, temperature: 0, maxOutputTokens: 60 });
    let text = "";
    for await (const part of answer.textStream) text += part;
    if (name !== "completion") expect(text.includes(word), "the answer");
    expect((await answer.usage).outputTokens > 0, "usage");
    expect(["stop", "length"].includes(await answer.finishReason), "why it ended");
  });

  if (name === "completion") continue;
  await check(`${name}: an object by a schema`, async () => {
    // No number: a small model may go on with its digits to the end of its budget.
    const form = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"] };
    const output = Output.object({ schema: jsonSchema({ ...form, additionalProperties: false }) });
    const answer = await generateText({ model: chosen, prompt: question, temperature: 0, output });
    expect(typeof answer.output.sure === "boolean", "an object of the schema");
  });

  for (const [kind, work] of [["generateText", generateText], ["streamText", streamText]]) {
    await check(`${name}: a tool by ${kind}`, async () => {
      const { asked, tools } = timer();
      const prompt = "Set a timer for 45 minutes.";
      const answer = await work({ model: chosen, prompt, tools, stopWhen: stop, temperature: 0 });
      if (answer.consumeStream) await answer.consumeStream();
      expect(asked[0] === 45, "the tool was called");
    });
  }
}
