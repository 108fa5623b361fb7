"""WebSocket links between members, the driver of the mesh machine, and where members may be found."""
