"""What serving a request would take and cost, candidate by candidate."""
