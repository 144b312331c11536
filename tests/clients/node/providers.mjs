// The AI SDK's providers of a gateway, each a function that gives a model by its name.
export const providers = (load, url) => ({
  openai: async (name) =>
    (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(name),
  chat: async (name) =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({
      name: "pagewire",
      baseURL: `${url}/v1`,
    })(name),
  anthropic: async (name) =>
    (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(
      name,
    ),
});
