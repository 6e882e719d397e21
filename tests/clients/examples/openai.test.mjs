// OpenAI's client for Node: its examples of chats, streams, tools, formats, responses, files and batches.

import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { test } from "node:test";
import { setTimeout } from "node:timers/promises";
import OpenAI, { toFile } from "openai";
import {
  zodFunction,
  zodResponseFormat,
  zodResponsesFunction,
  zodTextFormat,
} from "openai/helpers/zod";
import { z } from "zod";

const { MODEL: model, ORDERS_MODEL: orders } = process.env;
const client = new OpenAI({ maxRetries: 0 });
const PROMPT = "Mira sends 12 parcels to Lyon.";
const ORDER = { name: "Mira", amount: 12, city: "Lyon" };
const Order = z.object({ name: z.string(), amount: z.number().int(), city: z.enum(["Lyon", "Paris"]) });
const Place = z.object({ city: z.enum(["Boston"]) });
const hello = [{ role: "user", content: "Hello!" }];
const greedy = { temperature: 0 };

test("a chat", async () => {
  const messages = [{ role: "developer", content: "Talk like a pirate." }, ...hello];
  const { data, response } = await client.chat.completions
    .create({ model, messages, ...greedy })
    .withResponse();
  assert.ok(data.choices[0].message.content);
  assert.ok(response.headers.get("x-request-id"));
});

test("a stream", async () => {
  let text = "";
  const stream = await client.chat.completions.create({ model, messages: hello, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.ok(text);
});

test("a stream that is left", async () => {
  const stream = await client.chat.completions.create({ model, messages: hello, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("a format of a fine-tune is right", async () => {
  const asked = { model: orders, messages: [{ role: "user", content: PROMPT }], ...greedy };
  const response_format = zodResponseFormat(Order, "order");
  const whole = await client.chat.completions.parse({ ...asked, response_format });
  assert.deepEqual(whole.choices[0].message.parsed, ORDER);
  const stream = client.chat.completions.stream({ ...asked, response_format });
  const streamed = await stream.finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, ORDER);
});

test("a function is called and its result sent back", async () => {
  const tools = [zodFunction({ name: "weather", parameters: Place })];
  const asked = { model, tools, tool_choice: "required", ...greedy };
  const whole = await client.chat.completions.parse({ ...asked, messages: hello });
  const message = whole.choices[0].message;
  const [call] = message.tool_calls;
  assert.deepEqual(call.function.parsed_arguments, { city: "Boston" });
  const result = { role: "tool", tool_call_id: call.id, content: "50 degrees" };
  const again = await client.chat.completions.create({
    model,
    messages: [...hello, message, result],
    tools,
    max_completion_tokens: 50,
  });
  assert.ok(again.usage.prompt_tokens > whole.usage.prompt_tokens);
});

test("runTools runs them", async () => {
  let seen;
  const weather = {
    name: "weather",
    parse: JSON.parse,
    parameters: z.toJSONSchema(Place),
    function: ({ city }) => (seen = city),
  };
  const tool_choice = { type: "function", function: { name: "weather" } };
  const runner = client.chat.completions.runTools({
    model,
    messages: hello,
    tools: [{ type: "function", function: weather }],
    tool_choice,
    ...greedy,
  });
  await runner.done();
  assert.equal(seen, "Boston");
});

test("a response, whole and streamed", async () => {
  const asked = { model, instructions: "Talk like a pirate.", input: "Hello!", ...greedy };
  const whole = await client.responses.create(asked);
  const events = [];
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    events.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  assert.deepEqual([events[0], events.at(-1)], ["response.created", "response.completed"]);
});

test("a format of a response is right", async () => {
  const text = { format: zodTextFormat(Order, "order") };
  const asked = { model: orders, input: PROMPT, text, ...greedy };
  assert.deepEqual((await client.responses.parse(asked)).output_parsed, ORDER);
  const stream = client.responses.stream(asked);
  for await (const event of stream) assert.equal(typeof event.sequence_number, "number");
  assert.deepEqual((await stream.finalResponse()).output_parsed, ORDER);
});

test("a response calls a function, and its output is sent back", async () => {
  const tools = [zodResponsesFunction({ name: "weather", parameters: Place })];
  const input = [...hello];
  const asked = { model, tools, ...greedy };
  const first = await client.responses.parse({ ...asked, input, tool_choice: "required" });
  const [call] = first.output;
  assert.deepEqual(call.parsed_arguments, { city: "Boston" });
  input.push(...first.output, {
    type: "function_call_output",
    call_id: call.call_id,
    output: "50 degrees",
  });
  const second = await client.responses.create({ ...asked, input, max_output_tokens: 50 });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens);
});

test("models and errors", async () => {
  const names = [];
  for await (const known of client.models.list()) names.push(known.id);
  assert.ok(names.includes(model));
  const missing = client.chat.completions.create({ model: "none", messages: hello });
  await assert.rejects(missing, OpenAI.NotFoundError);
});

const ENDED = ["completed", "failed", "expired", "cancelled"];
const request = (custom_id, body) => ({ custom_id, method: "POST", url: "/v1/chat/completions", body });
const lines = (requests) => requests.map((each) => `${JSON.stringify(each)}\n`).join("");
const results = async (id) => (await (await client.files.content(id)).text()).trim().split("\n").map(JSON.parse);

async function ended(batch) {
  while (!ENDED.includes(batch.status)) {
    await setTimeout(200);
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

test("a file is uploaded, listed, read and deleted", async () => {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "lorikeet-"));
  const content = lines([request("a", { model, messages: hello })]);
  fs.writeFileSync(path.join(folder, "input.jsonl"), content);
  const file = await client.files.create({
    file: fs.createReadStream(path.join(folder, "input.jsonl")),
    purpose: "batch",
    expires_after: { anchor: "created_at", seconds: 3600 },
  });
  fs.rmSync(folder, { recursive: true });
  assert.deepEqual(
    [file.object, file.filename, file.bytes, file.purpose, file.expires_at - file.created_at],
    ["file", "input.jsonl", content.length, "batch", 3600],
  );
  const listed = [];
  for await (const each of client.files.list({ purpose: "batch", limit: 1 })) listed.push(each.id);
  assert.ok(listed.includes(file.id));
  assert.deepEqual(await client.files.retrieve(file.id), file);
  assert.equal(await (await client.files.content(file.id)).text(), content);
  assert.deepEqual(await client.files.delete(file.id), { id: file.id, object: "file", deleted: true });
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
});

test("a batch runs to its end", async () => {
  const asked = { model, messages: hello, max_tokens: 4, ...greedy };
  const input = lines([request("one", asked), request("two", asked), request("bad", { model: "none", messages: hello })]);
  const file = await client.files.create({ file: await toFile(Buffer.from(input), "input.jsonl"), purpose: "batch" });
  const made = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
    metadata: { for: "test" },
  });
  assert.deepEqual([made.object, made.status, made.metadata], ["batch", "validating", { for: "test" }]);
  const batch = await ended(made);
  assert.equal(batch.status, "completed");
  assert.deepEqual(batch.request_counts, { total: 3, completed: 2, failed: 1 });
  const answers = await results(batch.output_file_id);
  assert.deepEqual(answers.map(({ custom_id }) => custom_id).sort(), ["one", "two"]);
  for (const { response, error } of answers) {
    assert.deepEqual([response.status_code, error], [200, null]);
    assert.ok(response.body.choices[0].message.content);
  }
  const [failed] = await results(batch.error_file_id);
  assert.deepEqual([failed.custom_id, failed.response.status_code], ["bad", 404]);
  const listed = [];
  for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
  assert.ok(listed.includes(batch.id));
});

test("batches of completions, responses and embeddings", async () => {
  const bodies = {
    "/v1/completions": { model, prompt: "Hello!", max_tokens: 4 },
    "/v1/responses": { model, input: "Hello!", max_output_tokens: 4 },
    "/v1/embeddings": { model, input: "Hello!" },
  };
  for (const [endpoint, body] of Object.entries(bodies)) {
    const input = lines([{ ...request("one", body), url: endpoint }]);
    const file = await client.files.create({ file: await toFile(Buffer.from(input), "input.jsonl"), purpose: "batch" });
    const batch = await ended(
      await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" }),
    );
    const [{ response }] = await results(batch.output_file_id);
    assert.equal(response.status_code, 200);
    const { usage } = response.body;
    assert.equal(batch.usage.input_tokens, usage.prompt_tokens ?? usage.input_tokens);
    assert.equal(batch.usage.total_tokens, usage.total_tokens);
    assert.equal(batch.model, model);
  }
});

test("a batch is cancelled", async () => {
  const asked = { model, messages: hello, max_tokens: 200, ...greedy };
  const input = lines(Array.from({ length: 500 }, (_, number) => request(`${number}`, asked)));
  const file = await client.files.create({ file: await toFile(Buffer.from(input), "input.jsonl"), purpose: "batch" });
  const made = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
  });
  assert.ok(["cancelling", "cancelled"].includes((await client.batches.cancel(made.id)).status));
  const batch = await ended(made);
  assert.equal(batch.status, "cancelled");
});
