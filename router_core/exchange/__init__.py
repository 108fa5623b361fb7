"""One request's life after the decision to serve it: attempts, commit at first byte, failover, breaker."""
