"""Parts that HTTP servers of this package share: admission of requests, and errors as answers."""
