"""Tests with a real vLLM: `make test-vllm`."""
