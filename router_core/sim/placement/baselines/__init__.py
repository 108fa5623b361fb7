"""Other ways to place requests, for comparison: each as its authors describe it, none of them shipped as a choice."""
