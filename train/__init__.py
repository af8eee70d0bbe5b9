"""Training of what methods learn; nothing is trained yet."""
