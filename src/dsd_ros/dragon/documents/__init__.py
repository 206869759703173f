"""The documents of one side: store, index, retrieval."""
