// The openai package: a stream of chats, a forced call, and a response; prints what came.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const stream = await client.chat.completions.create({
  model: "tiny",
  messages,
  max_tokens: 8,
  stream: true,
});
let numChunks = 0;
for await (const chunk of stream) numChunks += chunk.choices.length;
const tools = [
  {
    type: "function",
    function: {
      name: "look",
      strict: true,
      parameters: {
        type: "object",
        properties: { near: { type: "boolean" } },
        required: ["near"],
        additionalProperties: false,
      },
    },
  },
];
const called = await client.chat.completions.create({
  model: "tiny",
  messages,
  tools,
  tool_choice: { type: "function", function: { name: "look" } },
  max_tokens: 40,
});
const response = await client.responses.create({
  model: "tiny",
  input: "Hello",
  max_output_tokens: 8,
  tools: [{ type: "web_search" }],
});
console.log(
  JSON.stringify({
    numChunks,
    calls: called.choices[0].message.tool_calls.map((call) => call.function.name),
    output: response.output.map((item) => item.type),
  }),
);
