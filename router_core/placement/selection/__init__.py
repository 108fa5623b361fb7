"""Which of the scored candidates serves."""
