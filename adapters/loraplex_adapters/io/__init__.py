"""Reading and writing of adapter files beside a busy step loop."""
