"""Programs of other libraries, imported, optimized, exported, and compared."""
