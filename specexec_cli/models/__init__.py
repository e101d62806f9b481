"""Models: skeletons on the meta device, streamed forward, KV cache, linears."""
