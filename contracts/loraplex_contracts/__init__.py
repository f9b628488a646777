"""Records and errors shared by several packages."""
