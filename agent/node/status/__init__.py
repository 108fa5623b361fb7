"""What this node shows to people."""
