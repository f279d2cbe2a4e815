"""What changes layers of a network from outside: low-rank adapters, image prompts, FreeU."""
