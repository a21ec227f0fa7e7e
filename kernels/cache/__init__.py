"""KV caches: appending in place, rotary embeddings, packed queries."""
