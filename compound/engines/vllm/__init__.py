"""Engine for vLLM servers, with adapters that are swapped while the server runs."""
