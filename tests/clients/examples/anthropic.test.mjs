// Anthropic's client for Node: its examples of messages, streams, tools and counts.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const { MODEL: model } = process.env;
const client = new Anthropic({ maxRetries: 0 });
const messages = [{ role: "user", content: "Hello, Claude" }];
const max_tokens = 50;
const WEATHER = {
  name: "get_weather",
  description: "Get the weather for a specific location",
  input_schema: {
    type: "object",
    properties: { location: { type: "string", enum: ["Boston"] } },
    required: ["location"],
  },
};

test("a message, its stream and its count", async () => {
  const whole = await client.messages.create({ model, max_tokens, messages });
  assert.equal(whole.content[0].type, "text");
  const stream = client.messages.stream({ model, max_tokens, messages });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const streamed = await stream.finalMessage();
  assert.equal(streamed.content[0].text, text);
  const counted = await client.messages.countTokens({ model, messages });
  assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
});

test("a tool is called and its result sent back", async () => {
  const tools = [WEATHER];
  const asked = { model, max_tokens: 200, tools };
  const first = await client.messages.create({ ...asked, messages, tool_choice: { type: "any" } });
  const used = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual(used.input, { location: "Boston" });
  const result = { type: "tool_result", tool_use_id: used.id, content: "50 degrees" };
  const turns = [
    ...messages,
    { role: first.role, content: first.content },
    { role: "user", content: [result] },
  ];
  const second = await client.messages.create({ ...asked, messages: turns });
  assert.equal(second.role, "assistant");
});

test("models and errors", async () => {
  const names = [];
  for await (const known of client.models.list()) names.push(known.id);
  assert.ok(names.includes(model));
  const missing = client.messages.create({ model: "none", max_tokens, messages });
  await assert.rejects(missing, Anthropic.NotFoundError);
});
