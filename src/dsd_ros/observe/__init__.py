"""What only looks on: bags and the pictures that people look at."""
