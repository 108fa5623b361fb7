"""The decision, its record, and what others are asked or told about it."""
