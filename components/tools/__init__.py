"""Tools that agents call: Python functions, operations of HTTP interfaces, and tools of MCP servers."""
