"""One request from its body to its answer, driven through the exchange machine."""
