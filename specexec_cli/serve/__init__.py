"""The HTTP server: OpenAI's protocol over an engine, and a page to chat on."""
