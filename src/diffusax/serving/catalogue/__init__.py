"""What a server can generate with, by names, and what of it is in memory."""
