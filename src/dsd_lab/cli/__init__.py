"""The `dsd-lab` commands, a module each: SUMMARY, add_arguments(parser), and what it runs."""
