"""Limits that rooms share which must not import each other."""

MAX_INSTRUCTION_CHARS = 2000  # of an instruction or a question
