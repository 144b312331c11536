// A picture through one of the AI SDK's providers: prints the text of the answer.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, kind, file, words] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText } = await load("ai");
const { providers } = await import("./providers.mjs");

const { text } = await generateText({
  model: await providers(load, url)[kind]("pictured"),
  messages: [
    {
      role: "user",
      content: [
        { type: "text", text: words },
        { type: "file", mediaType: "image/png", data: readFileSync(file) },
      ],
    },
  ],
  maxOutputTokens: 8,
  temperature: 0,
  maxRetries: 0,
});
console.log(JSON.stringify({ text }));
