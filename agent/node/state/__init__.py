"""What this node says about itself, and when."""
