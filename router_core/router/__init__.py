"""The stateful router: one node's own knowledge of endpoints and requests, and each request's way through it."""
