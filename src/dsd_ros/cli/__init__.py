"""The `dsd` commands, a module each: SUMMARY, add_arguments(parser), and what it runs."""
