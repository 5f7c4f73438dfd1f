// What somebody does with the openai package of npm. Prints what came back as JSON.

import OpenAI from "openai";

const [url, key] = [process.argv[2], "a-key"];
const messages = [{ role: "user", content: "What is the capital of Italy?" }];
const ask = { model: "demo", messages, temperature: 0 };
const point = {
  type: "object",
  properties: { x: { type: "integer", minimum: 0, maximum: 99 }, on: { type: "boolean" } },
  required: ["x", "on"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "point", parameters: point, strict: true } }];
const found = {};
process.on("exit", () => { if (found["errors"]?.length !== 3) console.error(`ended early, after ${Object.keys(found)}`); });

const sdk = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const answer = await sdk.chat.completions.create(ask);
found["answer"] = [answer.choices[0].message.content, answer.choices[0].finish_reason];
found["models"] = [];
for await (const model of sdk.models.list()) found["models"].push(model.id);

let text = "";
let usage = null;
for await (const chunk of await sdk.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
found["stream"] = [text, usage.completion_tokens === answer.usage.completion_tokens];
found["stream helper"] = await sdk.chat.completions.stream(ask).finalContent();

const response_format = { type: "json_schema", json_schema: { name: "point", schema: point, strict: true } };
const formed = await sdk.chat.completions.parse({ ...ask, response_format, max_tokens: 600 });
found["form"] = Object.keys(formed.choices[0].message.parsed ?? JSON.parse(formed.choices[0].message.content)).sort();

const required = { ...ask, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 600 };
const called = (await sdk.chat.completions.create(required)).choices[0];
const [call] = called.message.tool_calls;
found["call"] = [call.function.name, Object.keys(JSON.parse(call.function.arguments)).sort(), called.finish_reason];
const streamed = (await sdk.chat.completions.stream(required).finalChatCompletion()).choices[0].message.tool_calls[0];
found["call, streamed"] = streamed.function.arguments === call.function.arguments;
const after = [...messages, called.message, { role: "tool", tool_call_id: call.id, content: "done" }];
found["after the call"] = (await sdk.chat.completions.create({ ...ask, messages: after, max_tokens: 8 })).choices[0].message.role;

const runner = sdk.chat.completions.runTools({
  ...required,
  tools: [{ type: "function", function: { name: "point", parse: JSON.parse, parameters: point, function: () => "done" } }],
}, { maxChatCompletions: 1 });
found["tool runner"] = (await runner.finalFunctionToolCall()).name;

const vectors = await sdk.embeddings.create({ model: "demo", input: ["a", "b"] });
found["embeddings"] = vectors.data.map((each) => each.embedding.length > 8);
found["response"] = (await sdk.responses.create({ model: "demo", input: messages[0].content, temperature: 0, store: false })).output_text;

const stopped = new AbortController();
try {
  for await (const chunk of await sdk.chat.completions.create({ ...ask, stream: true, max_tokens: 600, ignore_eos: true }, { signal: stopped.signal })) stopped.abort();
  found["abort"] = "ended";
} catch (e) {
  found["abort"] = e.constructor.name;
}

const busy = new OpenAI({ baseURL: url, apiKey: "busy-key", maxRetries: 5 });
const both = await Promise.all([0, 1].map(() => busy.chat.completions.create({ ...ask, max_tokens: 300, ignore_eos: true })));
found["retries"] = both.map((each) => each.usage.completion_tokens);

found["errors"] = [];
for (const [apiKey, more] of [["other", {}], [key, { model: "nobody" }], [key, { temperature: -1 }]]) {
  try {
    await new OpenAI({ baseURL: url, apiKey, maxRetries: 0 }).chat.completions.create({ ...ask, ...more });
    found["errors"].push("none");
  } catch (e) {
    found["errors"].push([e.constructor.name, e.status, e.type]);
  }
}
console.log(JSON.stringify(found));
