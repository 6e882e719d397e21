// Vercel's AI SDK: texts, streams, tools and objects over both of OpenAI's APIs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { openai } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { MODEL, ORDERS_MODEL } = process.env;
const PROMPT = "Mira sends 12 parcels to Lyon.";
const ORDER = { name: "Mira", amount: 12, city: "Lyon" };
const Order = z.object({ name: z.string(), amount: z.number().int(), city: z.enum(["Lyon", "Paris"]) });
const asked = { maxRetries: 0, temperature: 0, maxOutputTokens: 200 };

for (const [name, api] of [["responses", openai.responses], ["chat", openai.chat]]) {
  test(`${name}: a text, whole and streamed`, async () => {
    const model = api(MODEL);
    const whole = await generateText({ model, prompt: "Invent a holiday.", ...asked });
    assert.ok(whole.usage.outputTokens > 0);
    const stream = streamText({ model, prompt: "Invent a holiday.", ...asked });
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, whole.text);
  });

  test(`${name}: a tool is run and its result sent back`, async () => {
    const weather = tool({
      description: "Get the weather of a city",
      inputSchema: z.object({ city: z.enum(["Boston"]) }),
      execute: async ({ city }) => `50 degrees in ${city}`,
    });
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const result = await generateText({
      model: api(MODEL),
      prompt: "The weather?",
      tools: { weather },
      prepareStep,
      stopWhen: stepCountIs(2),
      ...asked,
    });
    assert.equal(result.steps.length, 2);
    assert.equal(result.steps[0].toolResults[0].output, "50 degrees in Boston");
  });

  test(`${name}: an object of a fine-tune is right, whole and streamed`, async () => {
    const output = Output.object({ schema: Order });
    const order = { model: api(ORDERS_MODEL), prompt: PROMPT, output, ...asked };
    assert.deepEqual((await generateText(order)).output, ORDER);
    const stream = streamText(order);
    for await (const part of stream.partialOutputStream) assert.equal(typeof part, "object");
    assert.deepEqual(await stream.output, ORDER);
  });
}
