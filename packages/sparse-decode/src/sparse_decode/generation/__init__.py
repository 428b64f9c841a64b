"""Ways to generate besides plain decoding: exact mode, continuous batching."""
