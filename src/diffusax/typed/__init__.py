"""Values from outside as declared types, with ranges, and what is said of those that cannot be."""
