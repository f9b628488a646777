"""The commands of this package: `loraplex worker`, `loraplex serve`, `loraplex demo`."""
