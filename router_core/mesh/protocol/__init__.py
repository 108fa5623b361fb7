"""What two ends of a link say, and the events and actions of the mesh machine."""
