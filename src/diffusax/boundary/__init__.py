"""What comes from outside: typed values, tensors, files, and sentences about mistakes."""
