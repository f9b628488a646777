// openai for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { facts, report } from "./calls.mjs";

const client = new OpenAI({ baseURL: `${facts.url}/v1`, apiKey: "none", timeout: 60_000 });
const { base } = facts;
const adapter = facts.adapters[0];
const asked = { prompt: facts.prompt, max_tokens: facts.max_tokens, temperature: 0 };
const chat = { messages: [{ role: "user", content: facts.prompt }], max_tokens: facts.max_tokens, temperature: 0 };

const calls = {
  "models.list": async () => {
    const ids = [];
    for await (const card of client.models.list()) ids.push(card.id);
    assert.deepEqual(ids, [base, ...facts.adapters]);
    assert.equal((await client.models.retrieve(adapter)).id, adapter);
  },
  "completions.create": async () => {
    for (const [model, text] of Object.entries(facts.texts)) {
      const answer = await client.completions.create({ model, ...asked });
      assert.equal(answer.choices[0].text, text);
      assert.equal(answer.usage.completion_tokens, facts.max_tokens);
    }
  },
  "completions.create({stream: true})": async () => {
    const stream = await client.completions.create({ model: adapter, stream: true, ...asked });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0].text;
    assert.equal(text, facts.texts[adapter]);
  },
  "chat.completions.create": async () => {
    for (const [model, text] of Object.entries(facts.chats)) {
      const answer = await client.chat.completions.create({ model, ...chat });
      assert.equal(answer.choices[0].message.content, text);
    }
  },
  "chat.completions.stream()": async () => {
    const stream = client.chat.completions.stream({ model: adapter, n: 2, ...chat });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.index === 0 ? chunk.choices[0].delta.content ?? "" : "";
    assert.equal(text, facts.chats[adapter]);
  },
  "embeddings.create": async () => {
    const answer = await client.embeddings.create({ model: base, input: ["hi", facts.prompt] });
    assert.equal(answer.data.length, 2);
    assert.ok(Math.abs(answer.data[0].embedding.reduce((sum, one) => sum + one * one, 0) - 1) < 1e-3);
  },
  "NotFoundError: unknown adapter, streamed or not": async () => {
    for (const stream of [false, true]) {
      await assert.rejects(client.completions.create({ model: "nobody", stream, ...asked }), OpenAI.NotFoundError);
    }
  },
  "BadRequestError: names the field": async () => {
    await assert.rejects(client.completions.create({ model: base, ...asked, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  },
  AuthenticationError: async () => {
    const other = new OpenAI({ baseURL: `${facts.guarded_url}/v1`, apiKey: "wrong" });
    await assert.rejects(other.completions.create({ model: base, ...asked }), OpenAI.AuthenticationError);
  },
};

await report(calls);
