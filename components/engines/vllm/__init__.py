"""Sample from a vLLM server, and swap adapters while it runs."""
