"""An agent with the tools of two MCP servers, for `agent.yaml`: a calculator and a search in a catalogue."""
