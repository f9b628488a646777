"""Records and errors that cross the borders between parts."""
