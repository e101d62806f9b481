// Requests to the server that this page came from.

export async function allModels(key) {
  const response = await asked("v1/models", { headers: headersOf(key) });
  if (!response.ok) throw new Error(await reason(response));
  return (await response.json()).data;
}

// Asks for a reply; `heard` is called with each chunk of the stream. Ends with the reply.
export async function askFor(body, key, signal, heard) {
  const response = await asked("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headersOf(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The server ended the connection before the reply was complete: is it still running?");
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      heard(chunk);
    }
  }
}

// The browser's own words for a server that is not there, "Failed to fetch", say nothing.
function asked(address, request) {
  return fetch(address, request).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: start it again with `specexec serve`, then send once more.");
  });
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function reason(response) {
  try {
    const message = (await response.json()).error.message;
    return response.status === 401 ? `${message}: set it in Settings` : message;
  } catch {
    return `The server answered with an error that says no more than its number, ${response.status}.`;
  }
}
