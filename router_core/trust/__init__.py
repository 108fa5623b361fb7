"""Who may speak: statements of endorsement and removal, and the roster they add up to."""
