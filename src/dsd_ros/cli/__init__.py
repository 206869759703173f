"""The `dsd` command: a module per subcommand."""
