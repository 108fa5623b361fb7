"""What the mesh machine does at each event, subject by subject."""
