"""The `loraplex` command, and the subcommands that need nothing but the SDK."""
