"""The data plane: one client request to one endpoint, and its answer back, bytes untouched."""
