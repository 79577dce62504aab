// This server's routes. The key lives in this module's memory, and nowhere else.

let key = "";

export class KeyNeeded extends Error {}

export class Refused extends Error {}

export function useKey(value) {
  key = value;
}

export function hasKey() {
  return key !== "";
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${bytesOf(key)}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) throw new KeyNeeded("the server asks for a key");
  if (!response.ok) throw new Refused(await reasonOf(response));
  return response;
}

// A header carries bytes; a key that is not ASCII goes as UTF-8.
function bytesOf(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export async function state() {
  return (await call("console/state")).json();
}

// The chunks of a streamed chat, as objects, until [DONE].
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, dflash: { rounds: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message);
    yield chunk;
  }
  throw new Refused("The stream broke off.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data: ")) yield block.slice("data: ".length);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
