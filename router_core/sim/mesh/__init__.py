"""Many mesh machines at virtual time, with faults, and what must hold of them."""
