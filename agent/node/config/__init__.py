"""The config folder in force: endpoints, draining, reloading."""
