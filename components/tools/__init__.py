"""Tools that agents call: Python functions, tools of MCP servers, and programs in the sandbox."""
