"""The effectful half of pairmesh: sockets, TLS, sampling, engines, files, clock, relay, admin, CLI."""

__version__ = "0.1.0"
