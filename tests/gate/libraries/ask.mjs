// What a program with one of the npm packages does: `ask.mjs LIBRARY ADDRESS KEY MODEL` prints JSON.
const [library, url, key, model] = process.argv.slice(2);
const question = "What is the weather in Paris?";
const messages = [{ role: "user", content: question }];

async function withOpenai(maxRetries = 0) {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries });
  const ask = (more) =>
    client.chat.completions.create({ model, messages, max_tokens: 8, ...more });
  const text = (await ask({})).choices[0].message.content;
  if (maxRetries) return { text };
  let stream = "";
  for await (const chunk of await ask({ stream: true }))
    stream += chunk.choices[0].delta.content ?? "";
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const offered = (await ask({ tools })).choices[0].message;
  let error = "";
  try {
    await ask({ model: "unknown" });
  } catch (refused) {
    if (refused instanceof OpenAI.NotFoundError) error = refused.code;
  }
  return { text, stream, "with tools": Boolean(offered.content || offered.tool_calls), error };
}

async function withAi() {
  const { generateText, streamText, tool, APICallError } = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { z } = await import("zod");
  const at = createOpenAICompatible({ name: "here", baseURL: `${url}/v1`, apiKey: key });
  const ask = { model: at(model), prompt: question, maxOutputTokens: 8, maxRetries: 0 };
  const { text } = await generateText(ask);
  let stream = "";
  for await (const piece of streamText(ask).textStream) stream += piece;
  const tools = { weather: tool({ inputSchema: z.object({ city: z.string() }) }) };
  const offered = await generateText({ ...ask, tools });
  let error = "";
  try {
    await generateText({ ...ask, model: at("unknown") });
  } catch (refused) {
    if (APICallError.isInstance(refused)) error = JSON.parse(refused.responseBody).error.code;
  }
  return { text, stream, "with tools": Boolean(offered.text || offered.toolCalls.length), error };
}

const libraries = { openai: () => withOpenai(), "openai-retries": () => withOpenai(8), ai: withAi };
console.log(JSON.stringify(await libraries[library]()));
