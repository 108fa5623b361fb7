"""What the daemon tells its operator: log lines, metrics, the decision journal."""
