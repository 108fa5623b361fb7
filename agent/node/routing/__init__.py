"""What the relay needs to route requests: placement, targets, admission, learning."""
