"""The only readers of clock and entropy, and the only spawner of tasks."""
