"""Connections to engines and peers, and what one attempt sees of them."""
