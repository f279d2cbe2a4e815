"""What a client asks for, checked and told as text."""
