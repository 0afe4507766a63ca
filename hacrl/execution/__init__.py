"""Where agents live and run: the `Fleet` protocol and its engines."""
