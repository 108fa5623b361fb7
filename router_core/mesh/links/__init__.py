"""One link: its life, its rate limits, and what other members tell of broken ones."""
