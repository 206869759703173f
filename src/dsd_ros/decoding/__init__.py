"""The papers as pure functions: sampling transforms, acceptance rules, settings of a decode."""
