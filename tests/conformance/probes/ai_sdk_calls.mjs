// Vercel's AI SDK: its provider for OpenAI, with Responses, chats and completions, and the one for compatible servers.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { facts, report } from "./calls.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const adapter = facts.adapters[0];
const to = { baseURL: `${facts.url}/v1`, apiKey: "none" };
const openai = createOpenAI(to);
const compatible = createOpenAICompatible({ ...to, name: "own", includeUsage: true, supportsStructuredOutputs: true });
const chats = { "openai": openai(adapter), "openai.chat": openai.chat(adapter), "compatible": compatible(adapter) };
const texts = { "openai.completion": openai.completion(adapter), ...chats };
const asked = { prompt: facts.prompt, temperature: 0, maxOutputTokens: facts.max_tokens, maxRetries: 0 };
const long = { ...asked, maxOutputTokens: 400 };
const add = tool({
  inputSchema: z.object({ a: z.enum(["1", "2"]), b: z.enum(["3", "4"]) }),
  execute: ({ a, b }) => Number(a) + Number(b),
});
// A call in the first two steps, then a text.
const loop = {
  ...long,
  tools: { add },
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: ["required", { type: "tool", toolName: "add" }, "none"][stepNumber] }),
};

const streamed = async (asked) => {
  let fault;
  const stream = streamText({ ...asked, onError: ({ error }) => (fault = error) });
  const parts = [];
  for await (const part of stream.fullStream) parts.push(part);
  if (fault) throw fault;
  return [stream, parts];
};
const checkSteps = (steps) => {
  assert.deepEqual(steps.map((step) => step.finishReason).slice(0, 2), ["tool-calls", "tool-calls"]);
  assert.ok(steps.slice(0, 2).every((step) => step.toolResults[0].output >= 4));
  assert.equal(steps.length, 3);
};

const calls = {};
for (const [name, model] of Object.entries(texts)) {
  calls[`generateText, ${name}`] = async () => {
    const answer = await generateText({ model, ...asked });
    if (name in chats) assert.equal(answer.text, facts.chats[adapter]);
    assert.deepEqual([answer.usage.outputTokens, answer.finishReason], [facts.max_tokens, "length"]);
  };
  calls[`streamText, ${name}`] = async () => {
    const [stream] = await streamed({ model, ...asked });
    assert.equal(await stream.text, (await generateText({ model, ...asked })).text);
    assert.equal((await stream.usage).outputTokens, facts.max_tokens);
  };
}
for (const [name, model] of Object.entries(chats)) {
  calls[`generateText, tools in three steps, ${name}`] = async () => {
    checkSteps((await generateText({ model, ...loop })).steps);
  };
  calls[`streamText, tools in three steps, ${name}`] = async () => {
    const [stream, parts] = await streamed({ model, ...loop });
    checkSteps(await stream.steps);
    const written = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta).join("");
    const made = parts.filter((part) => part.type === "tool-call").map((part) => JSON.stringify(part.input)).join("");
    assert.equal(written.replaceAll(/\s/g, ""), made);
  };
  calls[`generateText, Output.object, ${name}`] = async () => {
    const schema = z.object({ first: z.boolean(), second: z.enum(["a", "b"]).nullable() });
    const { output } = await generateText({ model, ...long, output: Output.object({ schema }) });
    assert.equal(typeof output.first, "boolean");
  };
  calls[`APICallError: unknown adapter, ${name}`] = async () => {
    const nobody = { "openai": openai, "openai.chat": openai.chat, "compatible": compatible }[name]("nobody");
    for (const answer of [generateText, streamed]) {
      await assert.rejects(answer({ ...asked, model: nobody }), (error) => {
        assert.ok(APICallError.isInstance(error));
        assert.equal(error.statusCode, 404);
        return true;
      });
    }
  };
}
calls["embedMany"] = async () => {
  for (const model of [openai.embedding(facts.base), compatible.embeddingModel(facts.base)]) {
    const { embeddings } = await embedMany({ model, values: ["hi", facts.prompt] });
    assert.equal(embeddings.length, 2);
  }
};

await report(calls);
