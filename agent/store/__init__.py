"""What outlives the process: folders, atomic writes, checked files, and the few things kept in them."""
