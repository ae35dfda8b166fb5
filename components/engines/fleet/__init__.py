"""Engine of several replicas of one model: servers at given addresses, or vLLM processes of its own."""
