"""Read and write YAML with the position of every value."""
