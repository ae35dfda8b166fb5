// An agent in JavaScript with OpenAI's client. It knows nothing of compound:
// inputs are JSON on stdin, outputs are JSON on stdout.
import OpenAI from "openai";
import { text } from "node:stream/consumers";

const { question } = JSON.parse(await text(process.stdin));
const client = new OpenAI(); // reads OPENAI_BASE_URL and OPENAI_API_KEY
const stream = await client.chat.completions.create({
  model: "gpt-4o-mini",
  stream: true,
  temperature: 0,
  messages: [
    { role: "system", content: "You are a geographer. Answer the question." },
    { role: "user", content: question },
  ],
});
let answer = "";
for await (const chunk of stream) answer += chunk.choices[0]?.delta?.content ?? "";
console.log(JSON.stringify({ output: answer }));
