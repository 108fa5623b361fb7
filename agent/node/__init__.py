"""What makes the rooms one node: its own statement, its placer, its targets, its admission, its trust verbs."""
