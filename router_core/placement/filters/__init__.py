"""Which candidates may serve a request, and why the others may not."""
