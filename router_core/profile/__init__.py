"""What experience taught about engines: outcomes in, speeds, load times and their spread out."""
