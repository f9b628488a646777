"""Reading and writing of adapter files beside the step loop."""
