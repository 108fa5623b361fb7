"""What becomes of a request that no candidate has room for."""
