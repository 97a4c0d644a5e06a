// Drives Baton with the package `ai` and its providers for chats, for OpenAI's `/v1/responses` and
// for Anthropic's `/v1/messages`. tools/clients runs it.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";

const baseURL = process.argv[2];
const chats = createOpenAICompatible({
  name: "baton",
  baseURL,
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const responses = createOpenAI({ baseURL, apiKey: "none" });
const messages = createAnthropic({ baseURL, apiKey: "none" });
const tools = {
  get_weather: tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `It is sunny in ${city}.`,
  }),
};
const prompt = "What is the weather in Paris?";

async function check(model) {
  const shared = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const called = await generateText({ ...shared, prompt, tools, toolChoice: "required" });
  assert.equal(called.finishReason, "tool-calls");
  assert.equal(called.toolCalls[0].toolName, "get_weather");
  assert.deepEqual(called.toolCalls[0].input, { city: "Paris" });
  assert.equal(called.toolResults[0].output, "It is sunny in Paris.");

  // The result goes back to the model, which then answers.
  let step = 0;
  const answered = await generateText({
    ...shared,
    prompt,
    tools,
    stopWhen: stepCountIs(2),
    prepareStep: () => ({ toolChoice: step++ === 0 ? "required" : "none" }),
  });
  assert.equal(answered.steps.length, 2);
  assert.ok(answered.text.length > 0);

  const stream = streamText({ ...shared, prompt, tools, toolChoice: "required" });
  const kinds = new Set();
  for await (const part of stream.fullStream) {
    kinds.add(part.type);
  }
  assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-call"), [...kinds].join(" "));

  const person = await generateText({
    ...shared,
    prompt: "Ann is 41 years old.",
    output: Output.object({ schema: z.object({ name: z.string(), age: z.number() }) }),
  });
  assert.equal(typeof person.output.age, "number");

  const plain = streamText({ ...shared, prompt: "What is the capital of France?" });
  let text = "";
  for await (const piece of plain.textStream) {
    text += piece;
  }
  assert.match(text, /Paris/);
  assert.ok((await plain.usage).outputTokens > 0);
}

for (const model of [chats("smol"), responses("smol"), messages("smol")]) {
  try {
    await check(model);
  } catch (error) {
    console.error(model.provider);
    throw error;
  }
}
