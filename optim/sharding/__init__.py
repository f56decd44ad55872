"""Parameters that are spread over processes."""
