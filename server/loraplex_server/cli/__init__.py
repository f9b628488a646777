"""Commands of the server: `loraplex worker`, `loraplex serve`, and parts of `adapters` and `doctor`."""
