"""The admin API: 7435 for reading, ``admin.sock`` for reading and for every verb that changes state."""
