"""Where the weight bytes are, how they move, how fast the link is."""
