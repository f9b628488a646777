// OpenAI's client for Node: adapters are models. npm install openai
//
// node examples/http/openai_client.mjs [URL]
import OpenAI from "openai";

const prompt = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>";
const client = new OpenAI({ baseURL: `${process.argv[2] ?? "http://127.0.0.1:8000"}/v1`, apiKey: "none" });

for (const model of ["json", "sql"]) {
  const answer = await client.completions.create({ model, prompt, max_tokens: 96, temperature: 0 });
  console.log(`${model}: ${answer.choices[0].text}`);
}

const stream = await client.chat.completions.create({
  model: "yaml",
  messages: [{ role: "user", content: prompt }],
  max_tokens: 96,
  temperature: 0,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();
