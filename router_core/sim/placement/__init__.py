"""A fleet of engines, routers and clients at virtual time, held against other rules."""
