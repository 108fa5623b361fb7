"""Who this node is and whom it lets in: key, certificate, pinned TLS, accept task, routes, membership."""
