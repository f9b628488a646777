"""Command `loraplex` and the subcommands that need only the SDK."""
