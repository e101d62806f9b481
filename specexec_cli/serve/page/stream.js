// Requests to the server that this page came from.

export async function modelFacts(key) {
  const response = await fetch("v1/models", { headers: headersOf(key) });
  if (!response.ok) throw new Error(await reason(response));
  return (await response.json()).data[0];
}

// Asks for a reply; `heard` is called with each chunk of the stream. Ends with the reply.
export async function askFor(body, key, signal, heard) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headersOf(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended the connection before the reply was complete");
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

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function reason(response) {
  try {
    const message = (await response.json()).error.message;
    return response.status === 401 ? `${message}: set it in Settings` : message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
