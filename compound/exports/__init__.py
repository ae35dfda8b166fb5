"""Write systems as messages, request bodies, and programs for other libraries."""
