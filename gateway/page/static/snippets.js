// A call as a program: to be copied, without the key.

import { byId, setText } from "./dom.js";
import { key } from "./api.js";

const origin = () => new URL(".", document.baseURI).href.replace(/\/$/, "");
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** For a shell. */
export function curl(body) {
  const auth = key.get() ? ' \\\n  -H "authorization: Bearer $PAGEWIRE_API_KEY"' : "";
  return `curl ${quoted(`${origin()}/v1/chat/completions`)} -H 'content-type: application/json'${auth} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

const EXTRA = new Set(["top_k", "min_p", "repetition_penalty"]); // not OpenAI's: in extra_body

/** For OpenAI's client. */
export function python(body) {
  const own = Object.entries(body).filter(([name]) => !EXTRA.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => EXTRA.has(name)));
  if (Object.keys(extra).length) own.push(["extra_body", extra]);
  if (!("model" in body)) own.unshift(["model", "default"]);
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  return [
    "import os", "", "from openai import OpenAI", "",
    `client = OpenAI(base_url=${literal(`${origin()}/v1`)}, api_key=os.environ.get("PAGEWIRE_API_KEY", "none"))`,
    "answer = client.chat.completions.create(", ...lines, ")", "print(answer.choices[0].message.content)", "",
  ].join("\n");
}

function literal(value) {
  // JSON's strings, numbers, lists and objects are Python's; its other words are not.
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value && typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  }
  return { true: "True", false: "False", null: "None" }[value] ?? JSON.stringify(value);
}

/** Shows a program in the dialog. */
export function showCode(title, code) {
  setText(byId("code-title"), title);
  setText(byId("copied"), "");
  byId("code").value = code;
  byId("code-dialog").showModal();
}

byId("copy-code").addEventListener("click", async () => {
  byId("code").select();
  try {
    await navigator.clipboard.writeText(byId("code").value);
    setText(byId("copied"), "Copied.");
  } catch {
    setText(byId("copied"), "Press Ctrl+C: this browser copies for pages of https and localhost alone.");
  }
});
