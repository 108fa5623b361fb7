"""Which models a node should hold: load, unload and preload by what it is worth."""
