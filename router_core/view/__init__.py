"""What this node believes about the mesh: immutable snapshots and the fold that makes the next one."""
