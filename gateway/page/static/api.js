// Calls to this server: the key, errors, and events as they arrive.

const KEY = "pagewire.key"; // in sessionStorage: it ends with the tab

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A refusal of the server, or no answer at all (status 0). */
export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The answer to a call; throws ApiError unless it is a success. */
export async function call(path, { body, signal } = {}) {
  const headers = { accept: "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch {
    // A proxy's page, perhaps: the status has to do.
  }
  throw new ApiError(answer.status, told.message ?? `HTTP ${answer.status}`, told.code);
}

/** The server-sent events of an answer, as {name, data}; ends with the stream. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        yield parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(text) {
  let name = "message", data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("data: ")) data += line.slice(6);
    else if (line.startsWith("event: ")) name = line.slice(7);
  }
  return { name, data };
}
