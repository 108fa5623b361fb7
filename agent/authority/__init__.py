"""The client of the external placement authority."""
