"""Networks that make images larger."""
