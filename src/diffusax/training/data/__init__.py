"""Rows of data sets, examples made of them, and batches."""
