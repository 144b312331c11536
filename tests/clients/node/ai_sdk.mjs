// Two turns with a tool through one of the AI SDK's providers, streamed and whole: prints what came.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, kind] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));

const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { z } = await load("zod");
const { providers } = await import("./providers.mjs");

const model = await providers(load, url)[kind]("tiny");
const tools = {
  look: tool({
    description: "Looks",
    inputSchema: z.object({ near: z.boolean() }),
    execute: async () => "seen",
  }),
};
const asked = { model, tools, maxOutputTokens: 60, temperature: 0, maxRetries: 0 };

const messages = [{ role: "user", content: "Look." }];
const first = await generateText({
  ...asked,
  messages,
  toolChoice: { type: "tool", toolName: "look" },
  stopWhen: stepCountIs(1),
});
messages.push(...first.response.messages, { role: "user", content: "And again?" });
const second = streamText({ ...asked, messages, toolChoice: "auto", stopWhen: stepCountIs(1) });
let numParts = 0;
for await (const part of second.fullStream) {
  if (part.type === "error") throw part.error;
  numParts += 1;
}
const third = [...messages, ...(await second.response).messages];
third.push({ role: "user", content: "Once more." });
const last = await generateText({
  ...asked,
  messages: third,
  toolChoice: "none",
  stopWhen: stepCountIs(1),
});
console.log(
  JSON.stringify({
    calls: first.toolCalls.map((call) => call.toolName),
    results: first.toolResults.map((result) => result.output),
    numParts,
    finish: last.finishReason,
  }),
);
