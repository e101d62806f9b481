"""The HTTP server: OpenAI's and Anthropic's protocols over engines, and a page to chat on."""
