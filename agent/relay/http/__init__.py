"""Client connections: HTTP read and written, whatever is asked."""
